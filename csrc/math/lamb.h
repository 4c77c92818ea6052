// LAMB (You et al. 2020, algorithm 2) in two stages: the step before the trust ratio, then the weight.
#pragma once

#include "coefficients.h"

namespace amp_engine {

// The first stage: updates the moments and returns the step. The caller sums the squares of weight and step for their
// norms.
struct LambMoments {
  static constexpr bool kState1 = true;  // exp_avg
  static constexpr bool kState2 = true;  // exp_avg_sq
  static constexpr bool kNorm = false;

  struct Hyper {
    double beta1, beta2, eps, weight_decay, max_grad_norm;
    uint32_t decoupled;  // weight decay acts on the step, not on the gradient (L2)
    uint32_t bias_correction;
    uint32_t grad_averaging;  // the gradient enters the first moment with factor 1 - beta1, else with factor 1
    uint32_t use_nvlamb;      // trust ratio also if weight decay is 0

    template <class Visit>
    void visit(Visit const& visit) {
      visit("beta1", beta1), visit("beta2", beta2), visit("eps", eps), visit("weight_decay", weight_decay);
      visit("max_grad_norm", max_grad_norm), visit("decoupled", decoupled);
      visit("bias_correction", bias_correction), visit("grad_averaging", grad_averaging);
      visit("use_nvlamb", use_nvlamb);
    }
  };

  struct Coefficients {
    float factor, l2, decoupled, beta1, beta2, beta3, one_minus_beta2, inv_bias1, inv_sqrt_bias2, eps;
  };

  static AMP_HD Coefficients prepare(Hyper const& h, Prepared const& p) {
    double const bias1 = bias(h.bias_correction, h.beta1, p.step);
    double const bias2 = bias(h.bias_correction, h.beta2, p.step);
    return {float(p.factor / p.clip),
            float(h.decoupled ? 0.0 : h.weight_decay),
            float(h.decoupled ? h.weight_decay : 0.0),
            float(h.beta1),
            float(h.beta2),
            float(h.grad_averaging ? 1.0 - h.beta1 : 1.0),
            float(1.0 - h.beta2),
            float(1.0 / bias1),
            float(1.0 / ::sqrt(bias2)),
            float(h.eps)};
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

// The number that divides the gradient, to clip the norm over all of the optimizer's gradients.
AMP_HD double lamb_clip(LambMoments::Hyper const& h, double norm) {
  return h.max_grad_norm > 0.0 && norm > h.max_grad_norm ? norm / h.max_grad_norm : 1.0;
}

// The factor of the step: minus the learning rate times the trust ratio.
AMP_HD float lamb_minus_rate(LambMoments::Hyper const& h, double lr, double weight_norm, double step_norm) {
  bool const adapts = (h.use_nvlamb || h.weight_decay != 0.0) && weight_norm != 0.0 && step_norm != 0.0;
  return float(-lr * (adapts ? weight_norm / step_norm : 1.0));
}

}  // namespace amp_engine
