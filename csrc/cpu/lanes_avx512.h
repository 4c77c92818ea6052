// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "cpu/chunk_kernels.h"
#include "math/blocks.h"

namespace amp_engine::cpu::avx512 {

struct Tile;

struct Lanes {
  using Tile = avx512::Tile;  // for moments in blocks, instead of load_code and store_code
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
  static AMP_HD Noise of_weight(Noise noise) { return _mm512_srli_epi32(noise, 24); }
  static AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Lanes x, Noise noise) {
    __mmask16 const number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q);
    __m512i const sum = _mm512_add_epi32(_mm512_castps_si512(x.v), noise);
    __mmask16 const tie = _mm512_cmpeq_epi32_mask(_mm512_and_si512(sum, _mm512_set1_epi32(0xff00)),
                                                  _mm512_set1_epi32(0x8000));
    __m512i const up_or_down = _mm512_slli_epi32(_mm512_and_si512(noise, _mm512_set1_epi32(2)), 8);
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

// For each exponent of a block: its scale over 2^16, and its inverse scale.
struct Powers {
  float scale[256] = {}, inverse_scale[256] = {};

  constexpr Powers() {
    for (uint32_t exponent = 17; exponent < 255; ++exponent) {
      scale[exponent] = __builtin_bit_cast(float, (exponent - 16) << 23);
      inverse_scale[exponent] = __builtin_bit_cast(float, (254 - exponent) << 23);
    }
    scale[255] = __builtin_inff();
  }
};
constexpr Powers kPowers;

struct Constants {
  uint32_t one = 0x3f800000, noise = kNoise, byte = 0xff;
  uint32_t ones = 0x10001, twos = 0x20002, below_tie = 0x7f007f, tie = 0x800080, magnitudes = 0x7fff7fff;
};
constexpr Constants kConstants;

AMP_HD __m512i constant(uint32_t Constants::*which) { return _mm512_set1_epi32(int32_t(reread(kConstants).*which)); }

// Two blocks of math/blocks.h: the even and the odd elements of the first, then of the second. In this order two
// elements of 16 bits are the halves of a lane, and arithmetic on their bits is done on both at once.
struct Tile {
  static constexpr int kElements = 2 * kBlock;
  Lanes at[4];

  Tile() = default;
  AMP_HD Tile(Lanes a, Lanes b, Lanes c, Lanes d) : at{a, b, c, d} {}
  AMP_HD Tile(float x) : at{x, x, x, x} {}

  static AMP_HD Tile load(Type type, void const* data, int64_t i) {
    if (type == Type::bfloat16) {
      auto const* const words = static_cast<uint16_t const*>(data) + i;
      __m512i const first = _mm512_loadu_si512(words), second = _mm512_loadu_si512(words + kBlock);
      return {even(first), odd(first), even(second), odd(second)};
    }
    return of(Lanes::load(type, data, i), Lanes::load(type, data, i + 16), Lanes::load(type, data, i + 32),
              Lanes::load(type, data, i + 48));
  }
  // From the order of memory, and back.
  static AMP_HD Tile of(Lanes a, Lanes b, Lanes c, Lanes d) {
    __m512i const evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i const odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return {_mm512_permutex2var_ps(a.v, evens, b.v), _mm512_permutex2var_ps(a.v, odds, b.v),
            _mm512_permutex2var_ps(c.v, evens, d.v), _mm512_permutex2var_ps(c.v, odds, d.v)};
  }
  AMP_HD Tile in_order() const {
    __m512i const lower = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i const upper = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    return {_mm512_permutex2var_ps(at[0].v, lower, at[1].v), _mm512_permutex2var_ps(at[0].v, upper, at[1].v),
            _mm512_permutex2var_ps(at[2].v, lower, at[3].v), _mm512_permutex2var_ps(at[2].v, upper, at[3].v)};
  }

  // No remainder is 0x80 (math/halves.h).
  static AMP_HD Tile load_split24(void const* rounded, void const* remainder, int64_t i) {
    Tile x;
    for (int b = 0; b < 2; ++b) {
      __m512i const high = _mm512_loadu_si512(static_cast<uint16_t const*>(rounded) + i + b * kBlock);
      __mmask32 const zero = _mm512_testn_epi16_mask(high, constant(&Constants::magnitudes));
      __m512i const rest = _mm512_cvtepi8_epi16(bytes(remainder, i + b * kBlock));
      __m512i const low = _mm512_mask_max_epi16(rest, zero, rest, _mm512_setzero_si512());
      __m512i const of_even = _mm512_srai_epi32(bits(even(low)), 8), of_odd = _mm512_srai_epi32(bits(odd(low)), 8);
      x.at[2 * b] = _mm512_castsi512_ps(_mm512_add_epi32(bits(even(high)), of_even));
      x.at[2 * b + 1] = _mm512_castsi512_ps(_mm512_add_epi32(bits(odd(high)), of_odd));
    }
    return x;
  }

  // The 32 bits that each two elements of a block share.
  struct Pairs {
    __m512i of[2];
  };
  static AMP_HD __m512i hash(uint32_t of_step) {
    __m512i const pair = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return Lanes::mixed(_mm512_add_epi32(pair, _mm512_set1_epi32(int32_t(of_step))));
  }
  static AMP_HD Pairs pairs(int64_t i, __m512i hash) {
    uint32_t const block = uint32_t(uint64_t(i) / kBlock);
    uint32_t const added[2] = {amp_engine::mixed(block), amp_engine::mixed(block + 1)};
    return {{_mm512_add_epi32(hash, _mm512_set1_epi32(int32_t(reread(added)[0]))),
             _mm512_add_epi32(hash, _mm512_set1_epi32(int32_t(reread(added)[1])))}};
  }

  // The noise of codes as floats in [0, 1). `upper`: of even elements' first moments and odd elements' second moments.
  struct Noise {
    __m512 upper[2], lower[2];

    AMP_HD explicit Noise(Pairs const& pairs) {
      __m512i const fraction = constant(&Constants::noise), one = constant(&Constants::one);
      for (int b = 0; b < 2; ++b) {
        __m512i const high = _mm512_ternarylogic_epi32(_mm512_srli_epi32(pairs.of[b], 9), fraction, one, 0xea);
        __m512i const low = _mm512_ternarylogic_epi32(_mm512_slli_epi32(pairs.of[b], 7), fraction, one, 0xea);
        upper[b] = _mm512_sub_ps(_mm512_castsi512_ps(high), _mm512_castsi512_ps(one));
        lower[b] = _mm512_sub_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(one));
      }
    }
  };

  // Of numbers, not of NaN.
  AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Pairs const& pairs) const {
    __m512i const byte = constant(&Constants::byte), ones = constant(&Constants::ones), tie = constant(&Constants::tie);
    __m512i low[2];
    for (int b = 0; b < 2; ++b) {
      __m512i const of_even = _mm512_and_si512(pairs.of[b], byte);
      __m512i const of_odd = _mm512_and_si512(_mm512_srli_epi32(pairs.of[b], 16), byte);
      __m512i const sum = _mm512_add_epi32(bits(at[2 * b]), of_even);
      __m512i const odd_sum = _mm512_add_epi32(bits(at[2 * b + 1]), of_odd);
      __m512i const high = halves(_mm512_srli_epi32(sum, 16), odd_sum);
      __m512i const middle = _mm512_srli_epi16(halves(sum, _mm512_slli_epi32(odd_sum, 16)), 8);
      __m512i const up_or_down = _mm512_and_si512(pairs.of[b], constant(&Constants::twos));
      low[b] = _mm512_mask_add_epi16(middle, _mm512_cmpeq_epi16_mask(middle, tie), up_or_down,
                                     constant(&Constants::below_tie));
      __mmask32 const up = _mm512_cmpgt_epu16_mask(low[b], tie);
      _mm512_storeu_si512(static_cast<uint16_t*>(rounded) + i + b * kBlock,
                          _mm512_mask_add_epi16(high, up, high, ones));
    }
    put(remainder, i, _mm512_packus_epi16(low[0], low[1]));
  }
  AMP_HD bool has_nan() const {
    return _mm512_cmp_ps_mask(at[0].v, at[1].v, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(at[2].v, at[3].v, _CMP_UNORD_Q);
  }

  // `exponents`: of both blocks.
  template <class Code>
  static AMP_HD Tile load_codes(void const* codes, int64_t i, uint8_t const* exponents) {
    Tile x;
    for (int b = 0; b < 2; ++b) {
      __m256i const narrow = bytes(codes, i + b * kBlock);
      __m512i const wide = Code::kOfRoot
                               ? _mm512_cvtepu8_epi16(_mm256_max_epu8(narrow, _mm256_set1_epi8(1)))
                               : _mm512_cvtepi8_epi16(narrow);
      __m512 const scale = _mm512_set1_ps(kPowers.scale[exponents[b]]);
      x.at[2 * b] = _mm512_mul_ps(_mm512_cvtepi32_ps(bits(even(wide))), scale);
      x.at[2 * b + 1] = _mm512_mul_ps(_mm512_cvtepi32_ps(bits(odd(wide))), scale);
    }
    return x;
  }
  template <class Code>
  AMP_HD void store_codes(void* codes, int64_t i, uint8_t const* exponents, Noise const& noise) const {
    __m512 const(&of_evens)[2] = Code::kOfRoot ? noise.lower : noise.upper;
    __m512 const(&of_odds)[2] = Code::kOfRoot ? noise.upper : noise.lower;
    __m512i code[2];
    for (int b = 0; b < 2; ++b) {
      __m512 const scale = _mm512_set1_ps(kPowers.inverse_scale[exponents[b]]);
      __m512i const of_even = floor(_mm512_fmadd_ps(at[2 * b].v, scale, of_evens[b]));
      __m512i const of_odd = floor(_mm512_fmadd_ps(at[2 * b + 1].v, scale, of_odds[b]));
      code[b] = halves(of_even, _mm512_slli_epi32(of_odd, 16));
    }
    put(codes, i, Code::kOfRoot ? _mm512_packus_epi16(code[0], code[1]) : _mm512_packs_epi16(code[0], code[1]));
  }

  // The largest magnitudes of both blocks of two tiles. A NaN may be ignored.
  struct Four {
    uint32_t at[4];
  };
  static AMP_HD Four largest(Tile const& x, Tile const& y) {
    __m512 const of_x = of_lanes(larger(x.at[0], x.at[1]), larger(x.at[2], x.at[3]));
    __m512 const of_y = of_lanes(larger(y.at[0], y.at[1]), larger(y.at[2], y.at[3]));
    __m512 const four = _mm512_max_ps(_mm512_shuffle_ps(of_x, of_y, 0x44), _mm512_shuffle_ps(of_x, of_y, 0xee));
    __m256 const half = _mm256_max_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    Four found;
    __m128 const last = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(reinterpret_cast<float*>(found.at), last);
    return found;
  }

 private:
  static constexpr __mmask32 kOdd = 0xaaaaaaaau;

  static AMP_HD __m512i bits(Lanes x) { return _mm512_castps_si512(x.v); }
  // Elements of 16 bits as the upper halves of lanes, and back from the lower halves of one and the upper of the other.
  static AMP_HD Lanes even(__m512i elements) { return _mm512_castsi512_ps(_mm512_slli_epi32(elements, 16)); }
  static AMP_HD Lanes odd(__m512i elements) { return _mm512_castsi512_ps(_mm512_maskz_mov_epi16(kOdd, elements)); }
  static AMP_HD __m512i halves(__m512i even, __m512i odd) { return _mm512_mask_blend_epi16(kOdd, even, odd); }
  static AMP_HD __m512i floor(__m512 x) {
    return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static AMP_HD __m512 larger(Lanes a, Lanes b) { return _mm512_range_ps(a.v, b.v, 0x0b); }  // of |a| and |b|
  // Those of a and b, by turns.
  static AMP_HD __m512 of_lanes(__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  static AMP_HD __m256i bytes(void const* data, int64_t i) {
    return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(static_cast<uint8_t const*>(data) + i));
  }
  // 64 bytes, which a pack of two vectors left in the order of its lanes of 128 bits.
  static AMP_HD void put(void* data, int64_t i, __m512i packed) {
    __m512i const order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    _mm512_storeu_si512(static_cast<uint8_t*>(data) + i, _mm512_permutexvar_epi64(order, packed));
  }
};

AMP_HD Tile operator+(Tile const& a, Tile const& b) {
  return {a.at[0] + b.at[0], a.at[1] + b.at[1], a.at[2] + b.at[2], a.at[3] + b.at[3]};
}
AMP_HD Tile operator-(Tile const& a, Tile const& b) {
  return {a.at[0] - b.at[0], a.at[1] - b.at[1], a.at[2] - b.at[2], a.at[3] - b.at[3]};
}
AMP_HD Tile operator*(Tile const& a, Tile const& b) {
  return {a.at[0] * b.at[0], a.at[1] * b.at[1], a.at[2] * b.at[2], a.at[3] * b.at[3]};
}
AMP_HD Tile operator/(Tile const& a, Tile const& b) {
  return {a.at[0] / b.at[0], a.at[1] / b.at[1], a.at[2] / b.at[2], a.at[3] / b.at[3]};
}
AMP_HD Tile fma(Tile const& a, Tile const& b, Tile const& c) {
  return {fma(a.at[0], b.at[0], c.at[0]), fma(a.at[1], b.at[1], c.at[1]), fma(a.at[2], b.at[2], c.at[2]),
          fma(a.at[3], b.at[3], c.at[3])};
}
AMP_HD Tile sqrt(Tile const& a) { return {sqrt(a.at[0]), sqrt(a.at[1]), sqrt(a.at[2]), sqrt(a.at[3])}; }

}  // namespace amp_engine::cpu::avx512
