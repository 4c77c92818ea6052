// Adagrad (Duchi et al. 2011, equation 1), with L2 or decoupled weight decay.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Adagrad {
  static constexpr bool kState1 = true;  // sum
  static constexpr bool kState2 = false;

  struct Coefficients {
    float factor, l2, decoupled, eps, minus_lr;
  };

  static AMP_HD Coefficients prepare(Group const& group, Prepared const& p) {
    double const lr = learning_rate(group) / (1.0 + (p.step - 1.0) * group.lr_decay);
    return {float(p.factor),
            float(group.decoupled ? 0.0 : group.weight_decay),
            float(group.decoupled ? group.weight_decay : 0.0),
            float(group.eps),
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
