// NovoGrad (Ginsburg et al. 2019, algorithm 1): one second moment for a whole tensor, kept as a norm, not its square.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct NovoGrad {
  static constexpr bool kState1 = true;  // exp_avg
  static constexpr bool kState2 = false;
  static constexpr bool kNorm = true;

  struct Hyper {
    double beta1, beta2, eps, weight_decay;
    uint32_t bias_correction;
    uint32_t grad_averaging;       // the gradient enters the first moment with factor 1 - beta1, else with factor 1
    uint32_t decay_inside_moment;  // apex's reg_inside_moment
    uint32_t infinity_norm;        // the norm of a gradient is its largest magnitude, not its 2-norm
    uint32_t init_zero;            // the second moment starts at 0, not at the first norm

    template <class Visit>
    void visit(Visit const& visit) {
      visit("beta1", beta1), visit("beta2", beta2), visit("eps", eps), visit("weight_decay", weight_decay);
      visit("bias_correction", bias_correction), visit("grad_averaging", grad_averaging);
      visit("decay_inside_moment", decay_inside_moment), visit("infinity_norm", infinity_norm);
      visit("init_zero", init_zero);
    }
  };

  // The norm of a gradient before any factor, from the results of `check`.
  static AMP_HD double norm_of(Hyper const& h, double sum_squares, float largest) {
    return h.infinity_norm ? double(largest) : ::sqrt(sum_squares);
  }

  struct Coefficients {
    float factor, inv_denominator, decay, beta1, beta3, inv_bias1, minus_lr;
    uint32_t inside_moment;
  };

  static AMP_HD Coefficients prepare(Hyper const& h, Prepared const& p) {
    double const bias1 = bias(h.bias_correction, h.beta1, p.step);
    double const bias2 = ::sqrt(bias(h.bias_correction, h.beta2, p.step));
    double const before = p.step > 1.0 ? double(*p.norm) : h.init_zero ? 0.0 : p.gradient_norm;
    double const n = p.gradient_norm, b2 = h.beta2;
    double const norm = h.infinity_norm ? b2 * before + (1.0 - b2) * n
                                            : ::sqrt(b2 * before * before + (1.0 - b2) * n * n);
    *p.norm = float(norm);
    return {float(p.factor),
            float(1.0 / (norm / bias2 + h.eps)),
            float(h.weight_decay),
            float(h.beta1),
            float(h.grad_averaging ? 1.0 - h.beta1 : 1.0),
            float(1.0 / bias1),
            float(-p.lr),
            h.decay_inside_moment};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& exp_avg, V&, Coefficients const& c) {
    g = g * V(c.factor);
    if (c.inside_moment) {
      g = fma(V(c.decay), weight, g * V(c.inv_denominator));
      exp_avg = fma(V(c.beta3), g, exp_avg * V(c.beta1));
      weight = fma(V(c.minus_lr) * V(c.inv_bias1), exp_avg, weight);
    } else {
      exp_avg = fma(V(c.beta3), g, exp_avg * V(c.beta1));
      V const step = fma(V(c.decay), weight, exp_avg * V(c.inv_bias1) * V(c.inv_denominator));
      weight = fma(V(c.minus_lr), step, weight);
    }
  }
};

}  // namespace amp_engine
