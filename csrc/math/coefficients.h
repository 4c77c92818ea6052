// From hyperparameters, step count and device scalars to the few floats that a tensor's elements are updated with.
// Everything is computed in float64 and rounded once.
#pragma once

#include "rows.h"

namespace amp_engine {

// base^n by squaring: the same bits everywhere, which neither libm's nor CUDA's pow promises. n >= 0, a whole number.
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

// torch.nn.utils.clip_grad_norm_'s factor. A NaN norm gives NaN, as there.
AMP_HD double clip_factor(double norm, double max_norm) {
  double const factor = max_norm / (norm + 1e-6);
  return factor > 1.0 ? 1.0 : factor;
}

// What a gradient is multiplied by, from its scale, clipping and direction. Whoever calls has looked at found_inf
// before: a factor of 0 would not undo an infinity.
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

// What `prepare` of an optimizer gets to know about one tensor.
struct Prepared {
  double lr;
  double factor;         // of the gradient: gradient_factor
  double step;           // number of this step, from 1
  double gradient_norm;  // of this tensor's gradient times the factor; 0 where the optimizer did not ask for it
  float* norm;           // NovoGrad's running norm of this tensor, read and written
  double clip;           // LAMB: what the gradient is divided by, from the norm over all tensors
};

}  // namespace amp_engine
