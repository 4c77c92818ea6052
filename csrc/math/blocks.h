// Moments in 8 bits: whole numbers times a power of two, which blocks of 32 elements share, with stochastic rounding.
//
// A tensor of n elements is n codes in the order of memory, then ceil(n / 32) exponents of blocks, as float32 has them.
// A first moment is code * 2^exponent with codes from -127 to 127, a second moment (code * 2^exponent)^2 with codes up
// to 255: a step divides by the root, which varies less. FlashOptim (arXiv 2602.23349) has as many bits, blocks and the
// root, with scales that are no powers of two. With powers of two only the rounding of a code is not exact, and a moment
// that no step changes stays as it is.
#pragma once

#include "halves.h"

namespace amp_engine {

constexpr int kBlock = 32;

AMP_HD int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// Of a first moment, or of a momentum buffer.
struct SignedCode {
  static constexpr int kBits = 7;
  static constexpr bool kOfRoot = false;
};

// Of the root of a second moment. A block that is not 0 has no root below that of code 1: the least step of a first
// moment over a root of 0 would move its weight far away.
struct RootCode {
  static constexpr int kBits = 8;
  static constexpr bool kOfRoot = true;
};

// A block whose largest magnitude has the exponent kLeast or less, 2^-104, is 0: scales can then be divided by 2^16.
constexpr uint32_t kLeast = 23;

// `largest`: bits of the largest magnitude of a block. The largest code is below 2^kBits - 1, so that the noise cannot
// carry it to 2^kBits. Infinity, NaN and first moments from 3.38e38 on have 255.
template <class Code>
AMP_HD uint8_t exponent_of(uint32_t largest) {
  uint32_t const exponent = (largest + (1u << (24 - Code::kBits))) >> 23;
  return uint8_t(exponent >= 255 ? 255 : exponent <= kLeast ? 0 : exponent - (Code::kBits - 1));
}

// 2^exponent, or 0. Where a moment was not finite, no element of its block is.
AMP_HD float scale_of(uint8_t exponent) { return float_of(uint32_t(exponent) << 23); }
AMP_HD float inverse_scale_of(uint8_t exponent) {
  return exponent == 0 || exponent == 255 ? 0.0f : float_of(uint32_t(254 - exponent) << 23);
}

// The noise of an element of a tensor in blocks. Two elements, 2 k and 2 k + 1 of a block, share 32 bits: a hash of step
// and k, which is that of all blocks, plus a hash of the block.
struct BlockNoise {
  uint32_t first, second;  // for the two moments, as fractions of a float32
  uint32_t of_weight;      // of 8 bits
};

// 16 bits of a fraction: a whole code plus noise is exact, so that a moment that no step changes keeps its code.
constexpr uint32_t kNoise = 0x7fff80;

// `place`: of the element in its block.
AMP_HD BlockNoise noise_in_block(int64_t block, int place, uint32_t of_step) {
  uint32_t const bits = mixed(of_step + uint32_t(place / 2)) + mixed(uint32_t(block));
  uint32_t const upper = bits >> 9 & kNoise, lower = bits << 7 & kNoise;
  return place % 2 ? BlockNoise{lower, upper, bits >> 16 & 0xffu} : BlockNoise{upper, lower, bits & 0xffu};
}

template <class Code>
AMP_HD float decoded(uint32_t code, float scale) {
  if (!Code::kOfRoot) {
    return float(int8_t(code)) * scale;
  }
  float const root = float(code > 1 ? code : 1) * scale;
  return root * root;
}

// Of a first moment, or of the root of a second one. Of what is not finite, 0.
template <class Code>
AMP_HD uint8_t encoded(float x, float inverse_scale, uint32_t noise) {
  float const y = fma(x, inverse_scale, float_of(0x3f800000u | noise) - 1.0f);
  return uint8_t(y == y ? int(::floorf(y)) : 0);
}

}  // namespace amp_engine
