// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "math/blocks.h"

namespace amp_engine::cpu::avx512 {

struct Lanes {
  static constexpr char const* kSet = "avx512";
  static constexpr int kWidth = 16;
  __m512 v;

  Lanes() = default;
  AMP_HD Lanes(__m512 x) : v(x) {}
  AMP_HD Lanes(float x) : v(_mm512_set1_ps(x)) {}

  static AMP_HD Lanes load(Type type, void const* data, int64_t i) {
    if (type == Type::float32) {
      return _mm512_loadu_ps(static_cast<float const*>(data) + i);
    }
    auto const* at = reinterpret_cast<__m256i const*>(static_cast<uint16_t const*>(data) + i);
    __m256i const bits = _mm256_loadu_si256(at);
    return type == Type::float16 ? _mm512_cvtph_ps(bits)
                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static AMP_HD void store(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm512_storeu_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    auto* at = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i);
    _mm256_storeu_si256(at, x.low(type));
  }
  // Stores past the caches. The address must be a multiple of sizeof(Lanes), and a fence() must follow.
  static AMP_HD void stream(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm512_stream_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i), x.low(type));
  }
  static AMP_HD void fence() { _mm_sfence(); }

  // This function and those below give the same bits as math/halves.h and math/blocks.h.
  static AMP_HD Lanes load_split(void const* rounded, void const* remainder, int64_t i) {
    return joined(widened(rounded, i), widened(remainder, i));
  }
  static AMP_HD Lanes load_split24(void const* rounded, void const* remainder, int64_t i) {
    return joined(widened(rounded, i), _mm512_slli_epi32(bytes(remainder, i), 8));
  }
  static AMP_HD Lanes joined(__m512i high, __m512i low) {
    __mmask16 const up = _mm512_cmpgt_epu32_mask(low, _mm512_set1_epi32(0x8000));
    __mmask16 const zero = _mm512_testn_epi32_mask(high, _mm512_set1_epi32(0x7fff));
    __m512i const down = _mm512_mask_sub_epi32(high, __mmask16(up & ~zero), high, _mm512_set1_epi32(1));
    __m512i const kept = _mm512_maskz_mov_epi32(__mmask16(~(up & zero)), low);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(down, 16), kept));
  }
  static AMP_HD void store_split(void* rounded, void* remainder, int64_t i, Lanes x) {
    __m512i const one = _mm512_set1_epi32(1), given = _mm512_castps_si512(x.v);
    __mmask16 const tie = _mm512_cmpeq_epi32_mask(_mm512_and_si512(given, _mm512_set1_epi32(0x1ffff)),
                                                  _mm512_set1_epi32(0x18000));
    __mmask16 const number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q);
    __m512i const bits = _mm512_mask_add_epi32(given, tie, given, one);
    __m512i const low = _mm512_maskz_and_epi32(number, bits, _mm512_set1_epi32(0xffff));
    __m512i const high = _mm512_srli_epi32(bits, 16);
    __mmask16 const up = _mm512_cmpgt_epu32_mask(low, _mm512_set1_epi32(0x8000));
    __m512i const near = _mm512_mask_add_epi32(high, up, high, one);
    put(rounded, i, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc0), number, near));
    put(remainder, i, low);
  }

  using Noise = __m512i;
  static AMP_HD Noise noise(int64_t i, uint32_t of_step) {
    __m512i const lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(uint32_t(i) + of_step)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int32_t(0x846ca68bu)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  }
  static AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Lanes x, Noise noise) {
    __mmask16 const number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q);
    __m512i const sum = _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_srli_epi32(noise, 24));
    __mmask16 const tie = _mm512_cmpeq_epi32_mask(_mm512_and_si512(sum, _mm512_set1_epi32(0x1ff00)),
                                                  _mm512_set1_epi32(0x18000));
    __m512i const up_or_down = _mm512_and_si512(_mm512_srli_epi32(noise, 15), _mm512_set1_epi32(0x200));
    __m512i const neighbour = _mm512_sub_epi32(up_or_down, _mm512_set1_epi32(0x100));
    __m512i const bits = _mm512_mask_add_epi32(sum, tie, sum, neighbour);
    __m512i const low = _mm512_maskz_and_epi32(number, _mm512_srli_epi32(bits, 8), _mm512_set1_epi32(0xff));
    __m512i const high = _mm512_srli_epi32(bits, 16);
    __mmask16 const up = _mm512_cmpgt_epu32_mask(low, _mm512_set1_epi32(0x80));
    __m512i const near = _mm512_mask_add_epi32(high, up, high, _mm512_set1_epi32(1));
    put(rounded, i, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc0), number, near));
    put_bytes(remainder, i, low);
  }
  // Exchanges the halves of each element's noise.
  static AMP_HD Noise turned(Noise noise) {
    return _mm512_rol_epi32(noise, 16);
  }
  template <class Code>
  static AMP_HD Lanes load_code(void const* codes, int64_t i, float scale) {
    __m512i const code = bytes(codes, i);
    __m512i const magnitude = Code::kSigned ? _mm512_and_si512(code, _mm512_set1_epi32(Code::kTop)) : code;
    __m512i const y = _mm512_add_epi32(_mm512_slli_epi32(magnitude, kDropped), _mm512_set1_epi32(Code::kOffset));
    __m512 const offset = _mm512_set1_ps(float_of(Code::kOffset) * scale);
    __m512 const x = _mm512_fmsub_ps(_mm512_castsi512_ps(y), _mm512_set1_ps(scale), offset);
    if constexpr (!Code::kSigned) {
      return _mm512_max_ps(x, _mm512_set1_ps(float_of(Code::kLeast) * scale));
    }
    __m512i const sign = _mm512_slli_epi32(code, 24), bits = _mm512_castps_si512(x);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_set1_epi32(INT32_MIN), bits, 0xea));
  }
  template <class Code>
  static AMP_HD void store_code(void* codes, int64_t i, Lanes x, float inverse_scale, Noise noise) {
    __m512i const bits = _mm512_castps_si512(x.v);
    __m512 const magnitude = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    __m512 const offset = _mm512_set1_ps(float_of(Code::kOffset));
    __m512i const y = _mm512_castps_si512(_mm512_fmadd_ps(magnitude, _mm512_set1_ps(inverse_scale), offset));
    constexpr int kLeft = kDropped - 12 - Code::kNoise;
    __m512i const chance = kLeft >= 0 ? _mm512_slli_epi32(noise, kLeft & 31) : _mm512_srli_epi32(noise, -kLeft & 31);
    __m512i const mask = _mm512_set1_epi32(0xfff << (kDropped - 12));
    __m512i const constant = _mm512_set1_epi32(int32_t(added_constant<Code>));
    __m512i const added = _mm512_ternarylogic_epi32(chance, mask, constant, 0xea);
    __m512i const place = _mm512_srli_epi32(_mm512_add_epi32(y, added), kDropped);
    __m512i const code = _mm512_min_epu32(place, _mm512_set1_epi32(Code::kTop));
    if constexpr (Code::kSigned) {
      __m512i const sign = _mm512_srli_epi32(bits, 24);
      put_bytes(codes, i, _mm512_ternarylogic_epi32(sign, _mm512_set1_epi32(0x80), code, 0xea));
    } else {
      put_bytes(codes, i, code);
    }
  }
  template <int kShift>
  static AMP_HD void store_by_chance(void* data, int64_t i, Lanes x, Noise noise) {
    __m512i const mine = _mm512_and_si512(_mm512_srli_epi32(noise, kShift), _mm512_set1_epi32(0xffff));
    __m512i const sum = _mm512_add_epi32(_mm512_castps_si512(x.v), mine);
    __mmask16 const nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    put(data, i, _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0)));
  }

  struct Magnitudes {
    __m512i bits;

    // Written out, because an implicit constructor would not be compiled for the instruction set.
    AMP_HD Magnitudes() : bits(_mm512_setzero_si512()) {}

    AMP_HD void add(Lanes x) {
      bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff)));
    }
    AMP_HD uint32_t largest(uint32_t other) const {
      uint32_t const mine = _mm512_reduce_max_epu32(bits);
      return mine > other ? mine : other;
    }
  };

 private:
  static AMP_HD __m512i widened(void const* data, int64_t i) {
    auto const* at = reinterpret_cast<__m256i const*>(static_cast<uint16_t const*>(data) + i);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(at));
  }
  static AMP_HD __m512i bytes(void const* data, int64_t i) {
    auto const* at = reinterpret_cast<__m128i const*>(static_cast<uint8_t const*>(data) + i);
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
  }
  static AMP_HD void put_bytes(void* data, int64_t i, __m512i bytes) {
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint8_t*>(data) + i);
    _mm_storeu_si128(at, _mm512_cvtepi32_epi8(bytes));
  }
  static AMP_HD void put(void* data, int64_t i, __m512i halves) {
    auto* at = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i);
    _mm256_storeu_si256(at, _mm512_cvtepi32_epi16(halves));
  }
  AMP_HD __m256i low(Type type) const {
    return type == Type::float16 ? _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : bf16();
  }
  // Like bf16_from_float.
  AMP_HD __m256i bf16() const {
    __m512i const bits = _mm512_castps_si512(v);
    __m512i const odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i const sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 const nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0)));
  }
};

AMP_HD Lanes operator+(Lanes a, Lanes b) { return _mm512_add_ps(a.v, b.v); }
AMP_HD Lanes operator-(Lanes a, Lanes b) { return _mm512_sub_ps(a.v, b.v); }
AMP_HD Lanes operator*(Lanes a, Lanes b) { return _mm512_mul_ps(a.v, b.v); }
AMP_HD Lanes operator/(Lanes a, Lanes b) { return _mm512_div_ps(a.v, b.v); }
AMP_HD Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
AMP_HD Lanes sqrt(Lanes a) { return _mm512_sqrt_ps(a.v); }

}  // namespace amp_engine::cpu::avx512
