// The dynamic loss scale, with hysteresis as in Megatron-LM: an overflow counts once `hysteresis` came in a row.
#pragma once

#include "reduction.h"

namespace amp_engine {

struct ScaleRule {
  double growth_factor, backoff_factor, min_scale, max_scale;
  int growth_interval, hysteresis;
  bool dynamic;  // false: the scale stays, and the count runs on
};

// All in the memory of the scaler's device. The last three may be null.
struct ScaleState {
  float* scale;
  int32_t* growth_tracker;
  float* found_inf;             // != 0 is an overflow: it may be a sum over ranks
  int32_t* hysteresis_tracker;
  float* inv_scale_used;        // 1 / scale as the backward used it, written before the scale moves
  float* found_inf_used;        // takes found_inf over, which is then 0 for the next backward
};

AMP_HD float reciprocal(float scale) { return float(1.0 / double(scale)); }

AMP_HD void update_scale(ScaleState const& state, ScaleRule const& rule) {
  double const scale = double(*state.scale);
  if (state.inv_scale_used) {
    *state.inv_scale_used = reciprocal(*state.scale);
  }
  bool const overflow = *state.found_inf != 0.0f;
  if (state.found_inf_used) {
    *state.found_inf_used = *state.found_inf;
    *state.found_inf = 0.0f;
  }
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

}  // namespace amp_engine
