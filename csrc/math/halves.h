// Split weights and bfloat16 moments. A split weight is a bfloat16 and a remainder of 16 bits, or of 8 bits with
// stochastic rounding. A bfloat16 moment has stochastic rounding.
#pragma once

#include "types.h"

namespace amp_engine {

// A float32 as the bfloat16 that it rounds to, ties to even, and its own lower 16 bits. This cannot be exact for all
// values: of the 65,537 values that round to an even bfloat16, two have the same lower 16 bits. So `split` first moves
// a tie below an even bfloat16 up by one unit in the last place of float32. There are 32,640 such ties among the 4.28e9
// finite values; `joined` restores all others exactly.
struct Halves {
  uint16_t rounded;
  uint16_t remainder;
};

AMP_HD Halves split(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {0x7fc0u, 0};
  }
  bits += (bits & 0x1ffffu) == 0x18000u;
  uint32_t const remainder = bits & 0xffffu;
  return {uint16_t((bits >> 16) + (remainder > 0x8000u)), uint16_t(remainder)};
}

// `split` never rounds up to 0. Such a pair means that other code wrote the 0, so the remainder is ignored.
AMP_HD float joined(Halves const& halves) {
  bool const was_rounded_up = halves.remainder > 0x8000u;
  if (was_rounded_up && (halves.rounded & 0x7fffu) == 0) {
    return float_of(uint32_t(halves.rounded) << 16);
  }
  return float_of((uint32_t(halves.rounded) - was_rounded_up) << 16 | halves.remainder);
}

// A float32 rounded by chance to 24 bits, as the bfloat16 that these round to and the next 8 bits, which are the upper
// half of a remainder: `joined` with `remainder << 8` restores the 24 bits. To nearest, an update below 2^-17 of the
// weight would be lost. A tie between two bfloat16 becomes one of its neighbours, by chance too, so that no remainder
// is 0x80. `noise`: 8 bits.
AMP_HD Halves split24(float x, uint32_t noise) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {0x7fc0u, 0};
  }
  bits += noise;
  bits += (bits & 0xff00u) != 0x8000u ? 0u : noise & 2u ? 0x100u : 0u - 0x100u;
  uint32_t const remainder = bits >> 8 & 0xffu;
  return {uint16_t((bits >> 16) + (remainder > 0x80u)), uint16_t(remainder)};
}

// A hash, uniform enough in all bits: lowbias32 of C. Wellons, "Prospecting for Hash Functions" (2018), public domain.
AMP_HD uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// The noise of element i at a step: 16 bits for each of two moments; the highest 8 bits are for a weight of 24 bits,
// too. `of_step` is the number of the step after `mixed`. The noise depends on step and position only, so all backends,
// and a run that is resumed, have the same noise.
AMP_HD uint32_t noise_at(int64_t i, uint32_t of_step) { return mixed(uint32_t(i) + of_step); }

// Stochastic rounding: rounds up with the probability that makes the mean exact. With rounding to nearest, a second
// moment with beta2 = 0.999 would not change: a change of a thousandth is less than half of bfloat16's unit in the last
// place. `noise`: 16 bits.
AMP_HD uint16_t bf16_by_chance(float x, uint32_t noise) {
  uint32_t const bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0u;
  }
  return uint16_t((bits + noise) >> 16);
}

}  // namespace amp_engine
