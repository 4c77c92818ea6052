// Adagrad (Duchi et al. 2011, equation 1), with L2 or decoupled weight decay.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Adagrad {
  static constexpr bool kState1 = true;  // sum
  static constexpr bool kState2 = false;
  static constexpr bool kNorm = false;

  struct Hyper {
    double eps, weight_decay, lr_decay;
    uint32_t decoupled;  // weight decay acts on the weight, not on the gradient (L2)

    template <class Visit>
    void visit(Visit const& visit) {
      visit("eps", eps), visit("weight_decay", weight_decay), visit("lr_decay", lr_decay);
      visit("decoupled", decoupled);
    }
  };

  struct Coefficients {
    float factor, l2, decoupled, eps, minus_lr;
  };

  static AMP_HD Coefficients prepare(Hyper const& h, Prepared const& p) {
    double const lr = p.lr / (1.0 + (p.step - 1.0) * h.lr_decay);
    return {float(p.factor),
            float(h.decoupled ? 0.0 : h.weight_decay),
            float(h.decoupled ? h.weight_decay : 0.0),
            float(h.eps),
            float(-lr)};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& sum, V&, Coefficients const& c) {
    g = g * V(c.factor);
    g = fma(V(c.l2), weight, g);
    sum = fma(g, g, sum);
    V const step = fma(V(c.decoupled), weight, g / (sqrt(sum) + V(c.eps)));
    weight = fma(V(c.minus_lr), step, weight);
  }
};

}  // namespace amp_engine
