// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "math/blocks.h"

namespace amp_engine::cpu::avx512 {

struct Block;

struct Lanes {
  using Block = avx512::Block;  // for moments in blocks, instead of load_code and store_code
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
  static AMP_HD __m512i mixed(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int32_t(0x846ca68bu)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  }
  static AMP_HD Noise noise(int64_t i, uint32_t of_step) {
    __m512i const lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return mixed(_mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(uint32_t(i) + of_step))));
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

// The 32 elements of a block of math/blocks.h. In this order two elements of 16 bits are the halves of a lane, and
// arithmetic on their bits is done on both at once.
struct Block {
  Lanes even, odd;

  Block() = default;
  AMP_HD Block(Lanes even, Lanes odd) : even(even), odd(odd) {}
  AMP_HD Block(float x) : even(x), odd(x) {}

  // From the order of memory, and back.
  static AMP_HD Block of(Lanes lower, Lanes upper) {
    __m512i const evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i const odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return {_mm512_permutex2var_ps(lower.v, evens, upper.v), _mm512_permutex2var_ps(lower.v, odds, upper.v)};
  }
  AMP_HD Lanes lower() const {
    __m512i const order = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutex2var_ps(even.v, order, odd.v);
  }
  AMP_HD Lanes upper() const {
    __m512i const order = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    return _mm512_permutex2var_ps(even.v, order, odd.v);
  }

  static AMP_HD Block load(Type type, void const* data, int64_t i) {
    if (type == Type::bfloat16) {
      __m512i const bits = _mm512_loadu_si512(static_cast<uint16_t const*>(data) + i);
      return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
              _mm512_castsi512_ps(_mm512_maskz_mov_epi16(kOdd, bits))};
    }
    return of(Lanes::load(type, data, i), Lanes::load(type, data, i + Lanes::kWidth));
  }
  static AMP_HD Block load_split24(void const* rounded, void const* remainder, int64_t i) {
    __m512i const high = _mm512_loadu_si512(static_cast<uint16_t const*>(rounded) + i);
    __m512i const low = _mm512_cvtepu8_epi16(bytes(remainder, i));
    __mmask32 const up = _mm512_cmpgt_epu16_mask(low, words(0x80));
    __mmask32 const zero = _mm512_mask_testn_epi16_mask(up, high, words(0x7fff));
    __m512i const kept = _mm512_slli_epi16(_mm512_mask_mov_epi16(low, zero, _mm512_setzero_si512()), 8);
    __m512i const down = _mm512_mask_sub_epi16(high, _kandn_mask32(zero, up), high, words(1));
    return {_mm512_castsi512_ps(_mm512_mask_blend_epi16(kOdd, kept, _mm512_slli_epi32(down, 16))),
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(kept, 16), down))};
  }

  struct Noise {
    __m512i even, odd;
  };
  static AMP_HD Noise noise(int64_t i, uint32_t of_step) {
    __m512i const order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i const first = _mm512_set1_epi32(int32_t(uint32_t(i) / 2 + of_step));
    __m512i const noise = Lanes::mixed(_mm512_add_epi32(order, first)), turned = _mm512_rol_epi32(noise, 16);
    return {_mm512_inserti64x4(noise, _mm512_castsi512_si256(turned), 1), _mm512_shuffle_i64x2(noise, turned, 0xee)};
  }
  AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Noise const& noise) const {
    Noise const added = {_mm512_srli_epi32(noise.even, 24), _mm512_srli_epi32(noise.odd, 24)};
    __m512i const sum = _mm512_add_epi32(number(even), added.even);
    __m512i const odd_sum = _mm512_add_epi32(number(odd), added.odd);
    __m512i const high = upper_halves(sum, odd_sum), middle = _mm512_srli_epi16(lower_halves(sum, odd_sum), 8);
    __mmask32 const half = _mm512_cmpeq_epi16_mask(middle, words(0x80));
    __mmask32 const tie = _mm512_mask_test_epi16_mask(half, high, words(1));
    // The lowest bit of the noise selects the neighbour.
    __m512i const neighbours = _mm512_set1_epi32(0x0081007f);
    __m512i const low = _mm512_mask_permutexvar_epi16(middle, tie, lower_halves(added.even, added.odd), neighbours);
    __mmask32 const up = _mm512_cmpgt_epu16_mask(low, words(0x80));
    _mm512_storeu_si512(static_cast<uint16_t*>(rounded) + i, _mm512_mask_add_epi16(high, up, high, words(1)));
    put(remainder, i, _mm512_cvtepi16_epi8(low));
  }

  template <class Code>
  static AMP_HD Block load_codes(void const* codes, int64_t i, float scale) {
    __m256i const narrow = bytes(codes, i);
    __m512i const wide = Code::kSigned ? _mm512_cvtepi8_epi16(narrow) : _mm512_cvtepu8_epi16(narrow);
    __m512i const moved = _mm512_slli_epi16(wide, kDropped - 16);
    return {decoded<Code>(_mm512_slli_epi32(moved, 16), scale), decoded<Code>(moved, scale)};
  }
  template <class Code>
  AMP_HD void store_codes(void* codes, int64_t i, float inverse_scale, Noise const& noise) const {
    __m512i const sums = upper_halves(encoded<Code>(even, inverse_scale, noise.even),
                                      encoded<Code>(odd, inverse_scale, noise.odd));
    __m512i const places = _mm512_srli_epi16(sums, kDropped - 16);
    if constexpr (!Code::kSigned) {
      put(codes, i, _mm512_cvtusepi16_epi8(places));  // saturates at kTop
      return;
    }
    __m512i const sign = _mm512_srli_epi16(upper_halves(bits(even), bits(odd)), 8);
    __m512i const code = _mm512_min_epu16(places, words(Code::kTop));
    put(codes, i, _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(sign, words(0x80), code, 0xea)));
  }

  // The largest bits of |x| for two moments. The second one is not negative, but a NaN may have a sign.
  static AMP_HD void largest(Block const& x, Block const& y, uint32_t& of_x, uint32_t& of_y) {
    __m512i const first = _mm512_max_epu32(absolute(x.even), absolute(x.odd));
    __m512i const second = _mm512_max_epu32(bits(y.even), bits(y.odd));
    __m512i const pairs = _mm512_max_epu32(_mm512_unpacklo_epi32(first, second), _mm512_unpackhi_epi32(first, second));
    __m256i const eight = _mm256_max_epu32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
    __m128i const four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    uint64_t const both = uint64_t(_mm_cvtsi128_si64(_mm_max_epu32(four, _mm_unpackhi_epi64(four, four))));
    of_x = uint32_t(both);
    of_y = uint32_t(both >> 32) & 0x7fffffffu;
  }

 private:
  static constexpr __mmask32 kOdd = 0xaaaaaaaau;

  static AMP_HD __m512i words(int x) { return _mm512_set1_epi32(x | x << 16); }
  static AMP_HD __m512i bits(Lanes x) { return _mm512_castps_si512(x.v); }
  static AMP_HD __m512i absolute(Lanes x) { return _mm512_and_si512(bits(x), _mm512_set1_epi32(0x7fffffff)); }
  // The halves of lanes as 32 elements of 16 bits.
  static AMP_HD __m512i upper_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(even, 16), odd);
  }
  static AMP_HD __m512i lower_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(kOdd, even, _mm512_slli_epi32(odd, 16));
  }
  static AMP_HD __m256i bytes(void const* data, int64_t i) {
    return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(static_cast<uint8_t const*>(data) + i));
  }
  static AMP_HD void put(void* data, int64_t i, __m256i bytes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint8_t*>(data) + i), bytes);
  }
  // The bits of x, for NaN those of the NaN that `split24` gives.
  static AMP_HD __m512i number(Lanes x) {
    __mmask16 const nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(bits(x), nan, _mm512_set1_epi32(0x7fc00000));
  }
  // `moved`: a code's magnitude from bit kDropped on, and its sign in the highest bit.
  template <class Code>
  static AMP_HD Lanes decoded(__m512i moved, float scale) {
    __m512i const magnitude = _mm512_set1_epi32(Code::kTop << kDropped), offset = _mm512_set1_epi32(Code::kOffset);
    __m512 const y = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, magnitude, offset, 0xea));
    __m512 const power = _mm512_set1_ps(scale);
    __m512 const x = _mm512_fmsub_ps(y, power, _mm512_mul_ps(_mm512_castsi512_ps(offset), power));
    if constexpr (!Code::kSigned) {
      return _mm512_max_ps(x, _mm512_mul_ps(_mm512_set1_ps(float_of(Code::kLeast)), power));
    }
    __m512i const sign = _mm512_set1_epi32(0x7fffffff);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, sign, bits(x), 0xba));
  }
  // A code from bit kDropped on.
  template <class Code>
  static AMP_HD __m512i encoded(Lanes x, float inverse_scale, __m512i noise) {
    __m512 const magnitude = Code::kSigned ? _mm512_castsi512_ps(absolute(x)) : x.v;
    __m512 const offset = _mm512_castsi512_ps(_mm512_set1_epi32(Code::kOffset));
    __m512i const y = _mm512_castps_si512(_mm512_fmadd_ps(magnitude, _mm512_set1_ps(inverse_scale), offset));
    constexpr int kLeft = kDropped - 12 - Code::kNoise;
    __m512i const chance = kLeft >= 0 ? _mm512_slli_epi32(noise, kLeft & 31) : _mm512_srli_epi32(noise, -kLeft & 31);
    __m512i const mask = _mm512_set1_epi32(0xfff << (kDropped - 12));
    __m512i const constant = _mm512_set1_epi32(int32_t(added_constant<Code>));
    return _mm512_add_epi32(y, _mm512_ternarylogic_epi32(chance, mask, constant, 0xea));
  }
};

AMP_HD Block operator+(Block const& a, Block const& b) { return {a.even + b.even, a.odd + b.odd}; }
AMP_HD Block operator-(Block const& a, Block const& b) { return {a.even - b.even, a.odd - b.odd}; }
AMP_HD Block operator*(Block const& a, Block const& b) { return {a.even * b.even, a.odd * b.odd}; }
AMP_HD Block operator/(Block const& a, Block const& b) { return {a.even / b.even, a.odd / b.odd}; }
AMP_HD Block fma(Block const& a, Block const& b, Block const& c) {
  return {fma(a.even, b.even, c.even), fma(a.odd, b.odd, c.odd)};
}
AMP_HD Block sqrt(Block const& a) { return {sqrt(a.even), sqrt(a.odd)}; }

}  // namespace amp_engine::cpu::avx512
