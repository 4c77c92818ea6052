// LAMB (You et al. 2020, algorithm 2) in two stages: the step before the trust ratio, then the weight.
#pragma once

#include "coefficients.h"

namespace amp_engine {

// Writes the moments and the step `u`. Norms of weight and step are taken on the way.
struct LambMoments {
  struct Coefficients {
    float factor, l2, decoupled, beta1, beta2, beta3, one_minus_beta2, inv_bias1, inv_sqrt_bias2, eps;
  };

  static AMP_HD Coefficients prepare(Group const& group, Prepared const& p) {
    double const bias1 = group.bias_correction ? 1.0 - integer_power(group.beta1, p.step) : 1.0;
    double const bias2 = group.bias_correction ? 1.0 - integer_power(group.beta2, p.step) : 1.0;
    return {float(p.factor / p.clip),
            float(group.decoupled ? 0.0 : group.weight_decay),
            float(group.decoupled ? group.weight_decay : 0.0),
            float(group.beta1),
            float(group.beta2),
            float(group.grad_averaging ? 1.0 - group.beta1 : 1.0),
            float(1.0 - group.beta2),
            float(1.0 / bias1),
            float(1.0 / ::sqrt(bias2)),
            float(group.eps)};
  }

  template <class V>
  static AMP_HD V step(V g, V weight, V& exp_avg, V& exp_avg_sq, Coefficients const& c) {
    g = g * V(c.factor);
    g = fma(V(c.l2), weight, g);
    exp_avg = fma(V(c.beta3), g, exp_avg * V(c.beta1));
    exp_avg_sq = fma(V(c.one_minus_beta2) * g, g, exp_avg_sq * V(c.beta2));
    V const denominator = fma(sqrt(exp_avg_sq), V(c.inv_sqrt_bias2), V(c.eps));
    return fma(V(c.decoupled), weight, exp_avg * V(c.inv_bias1) / denominator);
  }
};

// LAMB's clipping by the norm over all of the optimizer's gradients.
AMP_HD double lamb_clip(Group const& group, double norm) {
  return group.max_grad_norm > 0.0 && norm > group.max_grad_norm ? norm / group.max_grad_norm : 1.0;
}

// What the step is multiplied by: minus the learning rate times the trust ratio.
AMP_HD float lamb_minus_rate(Group const& group, double weight_norm, double step_norm) {
  bool const adapts = (group.use_nvlamb || group.weight_decay != 0.0) && weight_norm != 0.0 && step_norm != 0.0;
  return float(-learning_rate(group) * (adapts ? weight_norm / step_norm : 1.0));
}

}  // namespace amp_engine
