// Weights and moments that take 16 bits where float32 takes 32: a weight as a bfloat16 and what that leaves of it, and a
// moment as a bfloat16 that is rounded up or down by chance.
#pragma once

#include "types.h"

namespace amp_engine {

// A float32 as the bfloat16 that it rounds to, ties to even, and its own lower half. Both exactly is impossible: of the
// 65,537 values that round to an even bfloat16, two have one lower half. So a tie below an even one is first moved up by
// one unit in the last place of float32, 32,640 of the 4.28e9 finite values; all others come back as they were.
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

// A 0 that is rounded up to has no remainder of `split`'s: it was written by somebody else, unseen.
AMP_HD float joined(Halves const& halves) {
  bool const was_rounded_up = halves.remainder > 0x8000u;
  if (was_rounded_up && (halves.rounded & 0x7fffu) == 0) {
    return float_of(uint32_t(halves.rounded) << 16);
  }
  return float_of((uint32_t(halves.rounded) - was_rounded_up) << 16 | halves.remainder);
}

// Uniform enough in all 32 bits: C. Wellons, "Prospecting for Hash Functions" (2018), lowbias32, in the public domain.
AMP_HD uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Of element i at a step, `of_step` being its number, mixed: 16 bits for each of two moments. A function of the step and of
// the place, so that all backends, and a run that is resumed, have the same.
AMP_HD uint32_t noise_at(int64_t i, uint32_t of_step) { return mixed(uint32_t(i) + of_step); }

// Rounded up with the probability that makes the mean exact. To nearest, a second moment with beta2 = 0.999 would stand
// still: a change of a thousandth is less than half of bfloat16's unit. `noise`: 16 bits.
AMP_HD uint16_t bf16_by_chance(float x, uint32_t noise) {
  uint32_t const bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0u;
  }
  return uint16_t((bits + noise) >> 16);
}

}  // namespace amp_engine
