// Adam (Kingma & Ba 2015, algorithm 1) and AdamW (Loshchilov & Hutter 2019, algorithm 2), in torch.optim's form.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Adam {
  static constexpr bool kState1 = true;   // exp_avg
  static constexpr bool kState2 = true;   // exp_avg_sq

  struct Coefficients {
    float factor, l2, minus_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size;
  };

  static AMP_HD Coefficients prepare(Group const& group, Prepared const& p) {
    double const lr = learning_rate(group);
    double const bias1 = group.bias_correction ? 1.0 - integer_power(group.beta1, p.step) : 1.0;
    double const bias2 = group.bias_correction ? 1.0 - integer_power(group.beta2, p.step) : 1.0;
    return {float(p.factor),
            float(group.decoupled ? 0.0 : group.weight_decay),
            float(group.decoupled ? -lr * group.weight_decay : 0.0),
            float(group.beta1),
            float(1.0 - group.beta1),
            float(group.beta2),
            float(1.0 - group.beta2),
            float(1.0 / ::sqrt(bias2)),
            float(group.eps),
            float(-lr / bias1)};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& exp_avg, V& exp_avg_sq, Coefficients const& c) {
    g = g * V(c.factor);
    g = fma(V(c.l2), weight, g);
    // exp_avg + (1 - beta1) * (g - exp_avg), from the nearer end: for a small beta1 the other form loses g.
    exp_avg = c.one_minus_beta1 < 0.5f ? fma(V(c.one_minus_beta1), g - exp_avg, exp_avg)
                                       : fma(V(c.beta1), exp_avg - g, g);
    exp_avg_sq = fma(V(c.one_minus_beta2) * g, g, exp_avg_sq * V(c.beta2));
    V const denominator = fma(sqrt(exp_avg_sq), V(c.inv_sqrt_bias2), V(c.eps));
    // Not weight * (1 - lr * decay), whose factor would be rounded before it is used.
    weight = fma(V(c.minus_step_size), exp_avg / denominator, fma(V(c.minus_decay), weight, weight));
  }
};

}  // namespace amp_engine
