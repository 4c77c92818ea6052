// Moments in 8 bits: blocks of 32 elements with one exponent, as in the OCP Microscaling formats (2023), whose elements
// get small by steps of a sixteenth and have stochastic rounding.
//
// A tensor of n elements is n codes in the order of memory, then ceil(n / 32) exponents of blocks, as float32 has them.
// With y = |x| / 2^exponent, a code is the place of y + offset among the floats with 4 bits of fraction from `offset`
// on: steps of offset / 16 near 0, of a 16th to a 32nd of large values. The last one is 2 - 1/16. A block's exponent is
// that of its largest magnitude, or the next one, so that no y + offset is above the last code: rounding is right on
// average.
#pragma once

#include "halves.h"

namespace amp_engine {

constexpr int kBlock = 32;
constexpr int kDropped = 19;  // bits of a float32's fraction that a code lacks

// A sign, and 128 magnitudes from 2^-7: of a first moment, or of a momentum buffer.
struct SignedCode {
  static constexpr bool kSigned = true;
  static constexpr uint32_t kTop = 127, kOffset = (127u - 7) << 23, kLeast = 0;
  static constexpr int kNoise = 0;  // where the 12 bits of its noise begin
};

// 256 magnitudes from 2^-15: of a second moment. A block that is not 0 has none below 2^-20 of its power of two: a step
// divides by the root, 2^-10, and the least step of a first moment, 2^-11, over a 0 would move its weight far away.
struct UnsignedCode {
  static constexpr bool kSigned = false;
  static constexpr uint32_t kTop = 255, kOffset = (127u - 15) << 23, kLeast = (127u - 20) << 23;
  static constexpr int kNoise = 12;
};

// Half of the noise's last bit, and -offset.
template <class Code>
constexpr uint32_t added_constant = (1u << (kDropped - 13)) | (0u - Code::kOffset);

AMP_HD int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// `largest`: bits of the largest magnitude of a block. Infinity and NaN have 255.
template <class Code>
AMP_HD uint8_t exponent_of(uint32_t largest) {
  constexpr uint32_t kCarry = (1u << kDropped) + (1u << (int(Code::kOffset >> 23) - 104));  // 1/16 + offset
  uint32_t const exponent = (largest + kCarry) >> 23;
  return uint8_t(exponent < 255 ? exponent : 255);
}

// 2^exponent. Where it would be subnormal, the block is 0; where a moment was not finite, no element of its block is.
AMP_HD float scale_of(uint8_t exponent) { return float_of(uint32_t(exponent) << 23); }
AMP_HD float inverse_scale_of(uint8_t exponent) {
  return exponent == 0 || exponent == 255 ? 0.0f
                                          : float_of(exponent == 254 ? 0x00400000u : uint32_t(254 - exponent) << 23);
}

// The noise of element i of a tensor in blocks: two elements, 16 apart in a block, share one of `noise_at`, which is
// turned by half for the second. The highest 8 bits are for a weight of 24 bits.
AMP_HD uint32_t noise_in_block(int64_t i, uint32_t of_step) {
  uint32_t const noise = noise_at(i / kBlock * (kBlock / 2) + i % (kBlock / 2), of_step);
  return i % kBlock < kBlock / 2 ? noise : (noise >> 16) | (noise << 16);
}

// Below all the roundings of a fused multiply-add are exact, but for the one of `encoded`, because scales are powers of
// two.
template <class Code>
AMP_HD float decoded(uint32_t code, float scale) {
  float const y = float_of(((code & Code::kTop) << kDropped) + Code::kOffset);
  float const x = fma(y, scale, -float_of(Code::kOffset) * scale);
  float const least = float_of(Code::kLeast) * scale;
  return Code::kSigned ? float_of(bits_of(x) | ((code & 0x80u) << 24)) : x > least ? x : least;
}

// Added to the bits of y + offset before the bits below a code are dropped: `noise` where these are, and -offset, so
// that codes begin at 0.
template <class Code>
AMP_HD uint32_t added_bits(uint32_t noise) {
  constexpr int kLeft = kDropped - 12 - Code::kNoise;
  uint32_t const moved = kLeft >= 0 ? noise << (kLeft & 31) : noise >> (-kLeft & 31);
  return (moved & (0xfffu << (kDropped - 12))) | added_constant<Code>;
}

// `noise`: that of noise_at.
template <class Code>
AMP_HD uint8_t encoded(float x, float inverse_scale, uint32_t noise) {
  float const y = fma(float_of(bits_of(x) & 0x7fffffffu), inverse_scale, float_of(Code::kOffset));
  uint32_t const place = (bits_of(y) + added_bits<Code>(noise)) >> kDropped;
  uint32_t const code = place > Code::kTop ? Code::kTop : place;
  return uint8_t(Code::kSigned ? code | ((bits_of(x) >> 24) & 0x80u) : code);
}

}  // namespace amp_engine
