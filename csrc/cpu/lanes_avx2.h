// Eight floats: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "math/types.h"

namespace amp_engine::cpu::avx2 {

struct Lanes {
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
  static AMP_HD void store(Type type, void* data, int64_t i, Lanes x) { x.store(type, data, i); }
  AMP_HD void store(Type type, void* data, int64_t i) const {
    if (type == Type::float32) {
      _mm256_storeu_ps(static_cast<float*>(data) + i, v);
      return;
    }
    auto* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i);
    _mm_storeu_si128(at, low(type));
  }
  // Past the caches, to an address that is a multiple of sizeof(Lanes) and before a fence().
  static AMP_HD void stream(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm256_stream_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i), x.low(type));
  }
  static AMP_HD void fence() { _mm_sfence(); }

  struct Magnitudes {
    __m256i bits;

    // Written out: an implicit constructor would not be compiled for the instruction set.
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
  AMP_HD __m128i low(Type type) const {
    return type == Type::float16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : bf16();
  }
  // As bf16_from_float.
  AMP_HD __m128i bf16() const {
    __m256i const bits = _mm256_castps_si256(v);
    __m256i const odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i const sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i const nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i const rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
    __m256i const packed = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
};

AMP_HD Lanes operator+(Lanes a, Lanes b) { return _mm256_add_ps(a.v, b.v); }
AMP_HD Lanes operator-(Lanes a, Lanes b) { return _mm256_sub_ps(a.v, b.v); }
AMP_HD Lanes operator*(Lanes a, Lanes b) { return _mm256_mul_ps(a.v, b.v); }
AMP_HD Lanes operator/(Lanes a, Lanes b) { return _mm256_div_ps(a.v, b.v); }
AMP_HD Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
AMP_HD Lanes sqrt(Lanes a) { return _mm256_sqrt_ps(a.v); }

}  // namespace amp_engine::cpu::avx2
