// Eight floats: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "math/blocks.h"

namespace amp_engine::cpu::avx2 {

struct Lanes {
  static constexpr char const* kSet = "avx2";
  static constexpr int kWidth = 8;
  __m256 v;

  Lanes() = default;
  AMP_HD Lanes(__m256 x) : v(x) {}
  AMP_HD Lanes(float x) : v(_mm256_set1_ps(x)) {}

  static AMP_HD Lanes load(Type type, void const* data, int64_t i) {
    if (type == Type::float32) {
      return _mm256_loadu_ps(static_cast<float const*>(data) + i);
    }
    auto const* at = reinterpret_cast<__m128i const*>(static_cast<uint16_t const*>(data) + i);
    __m128i const bits = _mm_loadu_si128(at);
    return type == Type::float16 ? _mm256_cvtph_ps(bits)
                                 : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static AMP_HD void store(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm256_storeu_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i);
    _mm_storeu_si128(at, x.low(type));
  }
  // Stores past the caches. The address must be a multiple of sizeof(Lanes), and a fence() must follow.
  static AMP_HD void stream(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm256_stream_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i), x.low(type));
  }
  static AMP_HD void fence() { _mm_sfence(); }

  // This function and those below give the same bits as math/halves.h and math/blocks.h.
  static AMP_HD Lanes load_split(void const* rounded, void const* remainder, int64_t i) {
    return joined(widened(rounded, i), widened(remainder, i));
  }
  static AMP_HD Lanes load_split24(void const* rounded, void const* remainder, int64_t i) {
    return joined(widened(rounded, i), _mm256_slli_epi32(bytes(remainder, i), 8));
  }
  static AMP_HD Lanes joined(__m256i high, __m256i low) {
    __m256i const none = _mm256_setzero_si256();
    __m256i const up = _mm256_cmpgt_epi32(low, _mm256_set1_epi32(0x8000));
    __m256i const zero = _mm256_cmpeq_epi32(_mm256_and_si256(high, _mm256_set1_epi32(0x7fff)), none);
    __m256i const down = _mm256_add_epi32(high, _mm256_andnot_si256(zero, up));  // a mask is -1
    __m256i const kept = _mm256_andnot_si256(_mm256_and_si256(up, zero), low);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(down, 16), kept));
  }
  static AMP_HD void store_split(void* rounded, void* remainder, int64_t i, Lanes x) {
    __m256i const given = _mm256_castps_si256(x.v);
    __m256i const tie = _mm256_cmpeq_epi32(_mm256_and_si256(given, _mm256_set1_epi32(0x1ffff)),
                                           _mm256_set1_epi32(0x18000));
    __m256i const number = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_ORD_Q));
    __m256i const bits = _mm256_sub_epi32(given, tie);
    __m256i const low = _mm256_and_si256(number, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
    __m256i const up = _mm256_cmpgt_epi32(low, _mm256_set1_epi32(0x8000));
    __m256i const near = _mm256_and_si256(_mm256_sub_epi32(_mm256_srli_epi32(bits, 16), up), _mm256_set1_epi32(0xffff));
    put(rounded, i, _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc0), near, number));
    put(remainder, i, low);
  }

  using Noise = __m256i;
  static AMP_HD __m256i mixed(__m256i x) {
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7feb352d));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(int32_t(0x846ca68bu)));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  }
  static AMP_HD Noise noise(int64_t i, uint32_t of_step) {
    __m256i const lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return mixed(_mm256_add_epi32(lane, _mm256_set1_epi32(int32_t(uint32_t(i) + of_step))));
  }
  static AMP_HD Noise of_weight(Noise noise) { return _mm256_srli_epi32(noise, 24); }
  struct BlockNoise {
    __m256i first, second, of_weight;
  };
  static AMP_HD BlockNoise noise_in_block(int64_t block, int first, uint32_t of_step) {
    constexpr int kOdd = 0xaa;
    __m256i const pair = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    __m256i const hash = mixed(_mm256_add_epi32(pair, _mm256_set1_epi32(int32_t(of_step + uint32_t(first / 2)))));
    __m256i const bits = _mm256_add_epi32(hash, _mm256_set1_epi32(int32_t(amp_engine::mixed(uint32_t(block)))));
    __m256i const fraction = _mm256_set1_epi32(kNoise);
    __m256i const upper = _mm256_and_si256(_mm256_srli_epi32(bits, 9), fraction);
    __m256i const lower = _mm256_and_si256(_mm256_slli_epi32(bits, 7), fraction);
    __m256i const of_weight = _mm256_blend_epi32(bits, _mm256_srli_epi32(bits, 16), kOdd);
    return {_mm256_blend_epi32(upper, lower, kOdd), _mm256_blend_epi32(lower, upper, kOdd),
            _mm256_and_si256(of_weight, _mm256_set1_epi32(0xff))};
  }
  static AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Lanes x, Noise noise) {
    __m256i const number = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_ORD_Q));
    __m256i const sum = _mm256_add_epi32(_mm256_castps_si256(x.v), noise);
    __m256i const tie = _mm256_cmpeq_epi32(_mm256_and_si256(sum, _mm256_set1_epi32(0xff00)), _mm256_set1_epi32(0x8000));
    __m256i const up_or_down = _mm256_slli_epi32(_mm256_and_si256(noise, _mm256_set1_epi32(2)), 8);
    __m256i const neighbour = _mm256_sub_epi32(up_or_down, _mm256_set1_epi32(0x100));
    __m256i const bits = _mm256_add_epi32(sum, _mm256_and_si256(tie, neighbour));
    __m256i const low = _mm256_and_si256(number, _mm256_and_si256(_mm256_srli_epi32(bits, 8), _mm256_set1_epi32(0xff)));
    __m256i const up = _mm256_cmpgt_epi32(low, _mm256_set1_epi32(0x80));
    __m256i const near = _mm256_and_si256(_mm256_sub_epi32(_mm256_srli_epi32(bits, 16), up), _mm256_set1_epi32(0xffff));
    put(rounded, i, _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc0), near, number));
    put_bytes(remainder, i, low);
  }
  template <class Code>
  static AMP_HD Lanes load_code(void const* codes, int64_t i, float scale) {
    __m128i const code = _mm_loadl_epi64(reinterpret_cast<__m128i const*>(static_cast<uint8_t const*>(codes) + i));
    __m256 const power = _mm256_set1_ps(scale);
    if constexpr (!Code::kOfRoot) {
      return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code)), power);
    }
    __m256i const some = _mm256_cvtepu8_epi32(_mm_max_epu8(code, _mm_set1_epi8(1)));
    __m256 const root = _mm256_mul_ps(_mm256_cvtepi32_ps(some), power);
    return _mm256_mul_ps(root, root);
  }
  template <class Code>
  static AMP_HD void store_code(void* codes, int64_t i, Lanes x, float inverse_scale, Noise noise) {
    __m256 const one = _mm256_set1_ps(1.0f);
    __m256 const above_one = _mm256_castsi256_ps(_mm256_or_si256(noise, _mm256_castps_si256(one)));
    __m256 const y = _mm256_fmadd_ps(x.v, _mm256_set1_ps(inverse_scale), _mm256_sub_ps(above_one, one));
    // A NaN becomes 0x80000000.
    put_bytes(codes, i, _mm256_and_si256(_mm256_cvttps_epi32(_mm256_floor_ps(y)), _mm256_set1_epi32(0xff)));
  }
  template <int kShift>
  static AMP_HD void store_by_chance(void* data, int64_t i, Lanes x, Noise noise) {
    __m256i const mine = _mm256_and_si256(_mm256_srli_epi32(noise, kShift), _mm256_set1_epi32(0xffff));
    __m256i const sum = _mm256_add_epi32(_mm256_castps_si256(x.v), mine);
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    put(data, i, _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan));
  }

  struct Magnitudes {
    __m256i bits;

    // Written out, because an implicit constructor would not be compiled for the instruction set.
    AMP_HD Magnitudes() : bits(_mm256_setzero_si256()) {}

    AMP_HD void add(Lanes x) {
      bits = _mm256_max_epu32(bits, _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff)));
    }
    AMP_HD uint32_t largest(uint32_t other) const {
      alignas(32) uint32_t lane[kWidth];
      _mm256_store_si256(reinterpret_cast<__m256i*>(lane), bits);
      for (uint32_t magnitude : lane) {
        other = magnitude > other ? magnitude : other;
      }
      return other;
    }
  };

 private:
  static AMP_HD __m256i widened(void const* data, int64_t i) {
    auto const* at = reinterpret_cast<__m128i const*>(static_cast<uint16_t const*>(data) + i);
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
  }
  static AMP_HD __m256i bytes(void const* data, int64_t i) {
    auto const* at = reinterpret_cast<__m128i const*>(static_cast<uint8_t const*>(data) + i);
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
  }
  static AMP_HD void put_bytes(void* data, int64_t i, __m256i bytes) {
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint8_t*>(data) + i);
    __m128i const halves = packed(bytes);
    _mm_storel_epi64(at, _mm_packus_epi16(halves, halves));
  }
  // The lower 16 bits of lanes that are below 2^16.
  static AMP_HD __m128i packed(__m256i halves) {
    __m256i const twice = _mm256_packus_epi32(halves, halves);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
  }
  static AMP_HD void put(void* data, int64_t i, __m256i halves) {
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i);
    _mm_storeu_si128(at, packed(halves));
  }
  AMP_HD __m128i low(Type type) const {
    return type == Type::float16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : bf16();
  }
  // Like bf16_from_float.
  AMP_HD __m128i bf16() const {
    __m256i const bits = _mm256_castps_si256(v);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i const sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return packed(_mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan));
  }
};

AMP_HD Lanes operator+(Lanes a, Lanes b) { return _mm256_add_ps(a.v, b.v); }
AMP_HD Lanes operator-(Lanes a, Lanes b) { return _mm256_sub_ps(a.v, b.v); }
AMP_HD Lanes operator*(Lanes a, Lanes b) { return _mm256_mul_ps(a.v, b.v); }
AMP_HD Lanes operator/(Lanes a, Lanes b) { return _mm256_div_ps(a.v, b.v); }
AMP_HD Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
AMP_HD Lanes sqrt(Lanes a) { return _mm256_sqrt_ps(a.v); }

}  // namespace amp_engine::cpu::avx2
