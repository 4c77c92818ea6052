// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "math/types.h"

namespace amp_engine::cpu::avx512 {

struct Lanes {
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
  static AMP_HD void store(Type type, void* data, int64_t i, Lanes x) { x.store(type, data, i); }
  AMP_HD void store(Type type, void* data, int64_t i) const {
    if (type == Type::float32) {
      _mm512_storeu_ps(static_cast<float*>(data) + i, v);
      return;
    }
    auto* at = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i);
    _mm256_storeu_si256(at, low(type));
  }
  // Past the caches, to an address that is a multiple of sizeof(Lanes) and before a fence().
  static AMP_HD void stream(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      _mm512_stream_ps(static_cast<float*>(data) + i, x.v);
      return;
    }
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i), x.low(type));
  }
  static AMP_HD void fence() { _mm_sfence(); }

  struct Magnitudes {
    __m512i bits;

    // Written out: an implicit constructor would not be compiled for the instruction set.
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
  AMP_HD __m256i low(Type type) const {
    return type == Type::float16 ? _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : bf16();
  }
  // As bf16_from_float.
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
