// Adam (Kingma & Ba 2015, algorithm 1) and AdamW (Loshchilov & Hutter 2019, algorithm 2), in torch.optim's form.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Adam {
  static constexpr bool kState1 = true;   // exp_avg
  static constexpr bool kState2 = true;   // exp_avg_sq
  static constexpr bool kNorm = false;

  struct Hyper {
    double beta1, beta2, eps, weight_decay;
    uint32_t decoupled;  // weight decay acts on the weight (AdamW), not on the gradient (L2)
    uint32_t bias_correction;

    template <class Visit>
    void visit(Visit const& visit) {
      visit("beta1", beta1), visit("beta2", beta2), visit("eps", eps), visit("weight_decay", weight_decay);
      visit("decoupled", decoupled), visit("bias_correction", bias_correction);
    }
  };

  struct Coefficients {
    float factor, l2, minus_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size;
  };

  static AMP_HD Coefficients prepare(Hyper const& h, Prepared const& p) {
    double const bias1 = bias(h.bias_correction, h.beta1, p.step);
    double const bias2 = bias(h.bias_correction, h.beta2, p.step);
    return {float(p.factor),
            float(h.decoupled ? 0.0 : h.weight_decay),
            float(h.decoupled ? -p.lr * h.weight_decay : 0.0),
            float(h.beta1),
            float(1.0 - h.beta1),
            float(h.beta2),
            float(1.0 - h.beta2),
            float(1.0 / ::sqrt(bias2)),
            float(h.eps),
            float(-p.lr / bias1)};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& exp_avg, V& exp_avg_sq, Coefficients const& c) {
    g = g * V(c.factor);
    g = fma(V(c.l2), weight, g);
    // exp_avg + (1 - beta1) * (g - exp_avg), from the nearer end: for a small beta1 the first form would lose g.
    exp_avg = c.one_minus_beta1 < 0.5f ? fma(V(c.one_minus_beta1), g - exp_avg, exp_avg)
                                       : fma(V(c.beta1), exp_avg - g, g);
    exp_avg_sq = fma(V(c.one_minus_beta2) * g, g, exp_avg_sq * V(c.beta2));
    V const denominator = fma(sqrt(exp_avg_sq), V(c.inv_sqrt_bias2), V(c.eps));
    // weight * (1 - lr * decay) would round its factor before the product.
    weight = fma(V(c.minus_step_size), exp_avg / denominator, fma(V(c.minus_decay), weight, weight));
  }
};

}  // namespace amp_engine
