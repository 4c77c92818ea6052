// The element types and their conversions, for single elements. Rounding is to nearest, ties to even.
#pragma once

#include "host_device.h"

namespace amp_engine {

// `remainder`: the lower half of a float32, stored beside the bfloat16 that the float32 rounds to; see halves.h.
// `byte`: of a copy, the upper 8 bits of a remainder (halves.h); of a moment, codes by blocks (blocks.h).
enum class Type : uint32_t { float32 = 0, float16 = 1, bfloat16 = 2, remainder = 3, byte = 4 };

AMP_HD bool is_remainder(Type type) { return type == Type::remainder || type == Type::byte; }

AMP_HD int64_t size_of(Type type) { return type == Type::float32 ? 4 : type == Type::byte ? 1 : 2; }

// Exact, because every float16 is a float32. A NaN keeps its payload and becomes quiet, as with F16C.
AMP_HD float float_from_f16(uint16_t h) {
  uint32_t const sign = uint32_t(h & 0x8000u) << 16;
  uint32_t const magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN
    return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u));
  }
  if (magnitude >= 0x0400u) {
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
  }
  // A subnormal is its bits as an integer, times 2^-24. Both the conversion and the product are exact.
  return float_of(sign | bits_of(float(magnitude) * 5.9604644775390625e-8f));
}

AMP_HD uint16_t f16_from_float(float x) {
  uint32_t const bits = bits_of(x);
  uint32_t const sign = bits >> 16 & 0x8000u;
  uint32_t const magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return uint16_t(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to inf
    return uint16_t(sign | 0x7c00u);
  }
  if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal float16
    uint32_t const rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return uint16_t(sign | (rounded - 0x38000000u) >> 13);
  }
  // After adding 0.5, the unit in the last place is 2^-24, so the addition rounds as for float16's subnormals.
  return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
}

AMP_HD float float_from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

// The CPU's vcvtneps2bf16 would flush subnormals to zero. A NaN becomes 0x7fc0, as in PyTorch.
AMP_HD uint16_t bf16_from_float(float x) {
  uint32_t const bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0u;
  }
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The bits of infinity in the type. Bits of magnitudes are ordered like the magnitudes, and every NaN is above
// infinity, so one integer maximum of |x| finds both.
AMP_HD uint32_t infinity_bits(Type type) {
  return type == Type::float32 ? 0x7f800000u : type == Type::float16 ? 0x7c00u : 0x7f80u;
}

AMP_HD float widened(uint32_t bits, Type type) {
  return type == Type::float32 ? float_of(bits)
                               : type == Type::float16 ? float_from_f16(uint16_t(bits)) : float_from_bf16(uint16_t(bits));
}

}  // namespace amp_engine
