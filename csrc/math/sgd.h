// SGD with momentum, rounded where torch.optim.SGD (foreach or loop) rounds: `add(x, alpha=a)` is one fma, `mul_` is one
// product.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Sgd {
  static constexpr bool kState1 = true;  // momentum_buffer; null without momentum
  static constexpr bool kState2 = false;

  struct Coefficients {
    float factor, decay_before, decay_after, momentum, one_minus_dampening, minus_lr;
    uint32_t nesterov, first, has_momentum;
  };

  static AMP_HD Coefficients prepare(Group const& group, Prepared const& p) {
    double const lr = learning_rate(group);
    return {float(p.factor),
            float(group.decay_after_momentum ? 0.0 : group.weight_decay),
            float(group.decay_after_momentum ? group.weight_decay : 0.0),
            float(group.momentum),
            float(1.0 - group.dampening),
            float(-lr),
            group.nesterov,
            p.step == 1.0,
            group.momentum != 0.0};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& buffer, V&, Coefficients const& c) {
    g = g * V(c.factor);
    // Not an fma with 0, which would turn a weight of inf into NaN, and -0 into 0.
    if (c.decay_before != 0.0f) {
      g = fma(weight, V(c.decay_before), g);
    }
    if (c.has_momentum) {
      buffer = c.first ? g : fma(g, V(c.one_minus_dampening), buffer * V(c.momentum));
      g = c.nesterov ? fma(buffer, V(c.momentum), g) : buffer;
    }
    if (c.decay_after != 0.0f) {
      g = fma(weight, V(c.decay_after), g);
    }
    weight = fma(g, V(c.minus_lr), weight);
  }
};

}  // namespace amp_engine
