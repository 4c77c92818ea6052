// Computes the coefficients, a few floats that update a tensor's elements, from hyperparameters, step count and device
// scalars. Everything is computed in float64 and rounded once.
#pragma once

#include "rows.h"

namespace amp_engine {

// base^n by squaring, for a whole number n >= 0. Gives the same bits everywhere, unlike pow of libm and CUDA.
AMP_HD double integer_power(double base, double n) {
  double result = 1.0;
  for (int64_t i = int64_t(n); i > 0; i >>= 1) {
    if (i & 1) {
      result *= base;
    }
    base *= base;
  }
  return result;
}

// What a moment is divided by: 1 - beta^step, or 1 without bias correction.
AMP_HD double bias(bool corrects, double beta, double step) {
  return corrects ? 1.0 - integer_power(beta, step) : 1.0;
}

// The factor of torch.nn.utils.clip_grad_norm_. A NaN norm gives NaN there, too.
AMP_HD double clip_factor(double norm, double max_norm) {
  double const factor = max_norm / (norm + 1e-6);
  return factor > 1.0 ? 1.0 : factor;
}

// The factor of a gradient, from its loss scale, clipping and direction. The caller must have checked found_inf,
// because a factor of 0 would not undo an infinity.
AMP_HD double gradient_factor(Control const& control, bool scaled, bool maximize) {
  double factor = 1.0;
  if (scaled) {
    factor = control.inv_scale ? double(*control.inv_scale) : 1.0;
    if (control.norm) {
      factor *= clip_factor(double(*control.norm), control.max_norm);
    }
  }
  return maximize ? -factor : factor;
}

// The arguments of an optimizer's `prepare` for one tensor.
struct Prepared {
  double lr;
  double factor;               // of the gradient, from gradient_factor
  double step;                 // number of this step, from 1
  double gradient_norm = 0.0;  // NovoGrad: norm of this tensor's gradient times the factor
  float* norm = nullptr;       // NovoGrad: running norm of this tensor, read and written
  double clip = 1.0;           // LAMB: divides the gradient; from the norm over all tensors
};

}  // namespace amp_engine
