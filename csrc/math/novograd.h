// NovoGrad (Ginsburg et al. 2019, algorithm 1): one second moment for a whole tensor, kept as a norm, not its square.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct NovoGrad {
  static constexpr bool kState1 = true;  // exp_avg
  static constexpr bool kState2 = false;

  struct Coefficients {
    float factor, inv_denominator, decay, beta1, beta3, inv_bias1, minus_lr;
    uint32_t inside_moment;
  };

  static AMP_HD Coefficients prepare(Group const& group, Prepared const& p) {
    double const lr = learning_rate(group);
    double const bias1 = group.bias_correction ? 1.0 - integer_power(group.beta1, p.step) : 1.0;
    double const bias2 = group.bias_correction ? ::sqrt(1.0 - integer_power(group.beta2, p.step)) : 1.0;
    double const before = p.step > 1.0 ? double(*p.norm) : group.init_zero ? 0.0 : p.gradient_norm;
    double const n = p.gradient_norm, b2 = group.beta2;
    double const norm = group.infinity_norm ? b2 * before + (1.0 - b2) * n
                                            : ::sqrt(b2 * before * before + (1.0 - b2) * n * n);
    *p.norm = float(norm);
    return {float(p.factor),
            float(1.0 / (norm / bias2 + group.eps)),
            float(group.weight_decay),
            float(group.beta1),
            float(group.grad_averaging ? 1.0 - group.beta1 : 1.0),
            float(1.0 / bias1),
            float(-lr),
            group.decay_inside_moment};
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
