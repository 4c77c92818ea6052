// SGD with momentum. Rounds where torch.optim.SGD (foreach or loop) rounds: `add(x, alpha=a)` is one fma, `mul_` is one
// product.
#pragma once

#include "coefficients.h"

namespace amp_engine {

struct Sgd {
  static constexpr bool kState1 = true;  // momentum_buffer; null without momentum
  static constexpr bool kState2 = false;
  static constexpr bool kNorm = false;

  struct Hyper {
    double momentum, dampening, weight_decay;
    uint32_t nesterov;
    uint32_t decay_after_momentum;  // FusedSGD's wd_after_momentum

    bool has_state1() const { return momentum != 0.0; }

    template <class Visit>
    void visit(Visit const& visit) {
      visit("momentum", momentum), visit("dampening", dampening), visit("weight_decay", weight_decay);
      visit("nesterov", nesterov), visit("decay_after_momentum", decay_after_momentum);
    }
  };

  struct Coefficients {
    float factor, decay_before, decay_after, momentum, one_minus_dampening, minus_lr;
    uint32_t nesterov, first, has_momentum;
  };

  static AMP_HD Coefficients prepare(Hyper const& h, Prepared const& p) {
    return {float(p.factor),
            float(h.decay_after_momentum ? 0.0 : h.weight_decay),
            float(h.decay_after_momentum ? h.weight_decay : 0.0),
            float(h.momentum),
            float(1.0 - h.dampening),
            float(-p.lr),
            h.nesterov,
            p.step == 1.0,
            h.momentum != 0.0};
  }

  template <class V>
  static AMP_HD void update(V g, V& weight, V& buffer, V&, Coefficients const& c) {
    g = g * V(c.factor);
    // An fma with 0 would turn an infinite weight into NaN, and -0 into 0.
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
