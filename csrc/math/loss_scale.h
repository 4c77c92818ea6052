// The dynamic loss scale, with hysteresis as in Megatron-LM: it backs off only after `hysteresis` overflows in a row.
#pragma once

#include "reduction.h"

namespace amp_engine {

struct ScaleRule {
  double growth_factor, backoff_factor, min_scale, max_scale;
  int growth_interval, hysteresis;
  bool dynamic;  // false: the scale never changes, but growth_tracker still counts
};

// All pointers are memory of the scaler's device. hysteresis_tracker and the pointers after it may be null.
struct ScaleState {
  float* scale;
  int32_t* growth_tracker;
  float* found_inf;             // != 0: overflow. May be a sum over ranks
  int32_t* hysteresis_tracker;
  float* inv_scale_used;        // set to 1 / scale of this backward, before the scale changes
  // [4]: found_inf, which is then set to 0 for the next backward; the new scale; scale_used; loss
  float* outcome;
  float const* scale_used;      // of the backward; null: the scale before this update
  float const* loss;            // null: 0
};
constexpr int64_t kOutcome = 4;

struct ScaleUpdate {
  ScaleState state;
  ScaleRule rule;
};

AMP_HD float reciprocal(float scale) { return float(1.0 / double(scale)); }

AMP_HD void move_scale(ScaleState const& state, ScaleRule const& rule, bool overflow) {
  double const scale = double(*state.scale);
  if (!rule.dynamic) {
    ++*state.growth_tracker;
    return;
  }
  if (overflow) {
    *state.growth_tracker = 0;
    if (state.hysteresis_tracker && --*state.hysteresis_tracker > 0) {
      return;
    }
    double const lower = scale * rule.backoff_factor;
    *state.scale = float(lower < rule.min_scale ? rule.min_scale : lower);
    return;
  }
  if (state.hysteresis_tracker) {
    *state.hysteresis_tracker = rule.hysteresis;
  }
  if (++*state.growth_tracker >= rule.growth_interval) {
    double const higher = scale * rule.growth_factor;
    float const grown = float(higher > rule.max_scale ? rule.max_scale : higher);
    if (is_finite(grown)) {
      *state.scale = grown;
    }
    *state.growth_tracker = 0;
  }
}

AMP_HD void update_scale(ScaleUpdate const& update) {
  ScaleState const& state = update.state;
  if (state.inv_scale_used) {
    *state.inv_scale_used = reciprocal(*state.scale);
  }
  float const found_inf = *state.found_inf;
  if (state.outcome) {
    state.outcome[0] = found_inf;
    state.outcome[2] = state.scale_used ? *state.scale_used : *state.scale;
    state.outcome[3] = state.loss ? *state.loss : 0.0f;
    *state.found_inf = 0.0f;
  }
  move_scale(state, update.rule, found_inf != 0.0f);
  if (state.outcome) {
    state.outcome[1] = *state.scale;
  }
}

}  // namespace amp_engine
