// One float at a time, for machines without AVX2.
#pragma once

#include "math/blocks.h"

namespace amp_engine::cpu::portable {

struct Lanes {
  static constexpr char const* kSet = "portable";
  static constexpr int kWidth = 1;
  float v;

  Lanes() = default;
  AMP_HD Lanes(float x) : v(x) {}

  static AMP_HD Lanes load(Type type, void const* data, int64_t i) {
    return type == Type::float32 ? static_cast<float const*>(data)[i]
                                 : widened(static_cast<uint16_t const*>(data)[i], type);
  }
  static AMP_HD void store(Type type, void* data, int64_t i, Lanes x) {
    if (type == Type::float32) {
      static_cast<float*>(data)[i] = x.v;
    } else {
      static_cast<uint16_t*>(data)[i] = type == Type::float16 ? f16_from_float(x.v) : bf16_from_float(x.v);
    }
  }

  static AMP_HD void stream(Type type, void* data, int64_t i, Lanes x) { store(type, data, i, x); }
  static AMP_HD void fence() {}

  // This function and those below call math/halves.h and math/blocks.h.
  static AMP_HD Lanes load_split(void const* rounded, void const* remainder, int64_t i) {
    return joined({static_cast<uint16_t const*>(rounded)[i], static_cast<uint16_t const*>(remainder)[i]});
  }
  static AMP_HD void store_split(void* rounded, void* remainder, int64_t i, Lanes x) {
    Halves const halves = split(x.v);
    static_cast<uint16_t*>(rounded)[i] = halves.rounded;
    static_cast<uint16_t*>(remainder)[i] = halves.remainder;
  }

  static AMP_HD Lanes load_split24(void const* rounded, void const* remainder, int64_t i) {
    uint32_t const low = static_cast<uint8_t const*>(remainder)[i];
    return joined({static_cast<uint16_t const*>(rounded)[i], uint16_t(low << 8)});
  }

  using Noise = uint32_t;
  static AMP_HD Noise noise(int64_t i, uint32_t of_step) { return noise_at(i, of_step); }
  static AMP_HD Noise of_weight(Noise noise) { return noise >> 24; }
  template <int kShift>
  static AMP_HD void store_by_chance(void* data, int64_t i, Lanes x, Noise noise) {
    static_cast<uint16_t*>(data)[i] = bf16_by_chance(x.v, noise >> kShift & 0xffffu);
  }

  static AMP_HD void store_split24(void* rounded, void* remainder, int64_t i, Lanes x, Noise noise) {
    Halves const halves = split24(x.v, noise);
    static_cast<uint16_t*>(rounded)[i] = halves.rounded;
    static_cast<uint8_t*>(remainder)[i] = uint8_t(halves.remainder);
  }
  using BlockNoise = amp_engine::BlockNoise;
  static AMP_HD BlockNoise noise_in_block(int64_t block, int first, uint32_t of_step) {
    return amp_engine::noise_in_block(block, first, of_step);
  }
  template <class Code>
  static AMP_HD Lanes load_code(void const* codes, int64_t i, float scale) {
    return decoded<Code>(static_cast<uint8_t const*>(codes)[i], scale);
  }
  template <class Code>
  static AMP_HD void store_code(void* codes, int64_t i, Lanes x, float inverse_scale, Noise noise) {
    static_cast<uint8_t*>(codes)[i] = encoded<Code>(x.v, inverse_scale, noise);
  }

  struct Magnitudes {
    uint32_t bits = 0;

    AMP_HD void add(Lanes x) {
      uint32_t const magnitude = bits_of(x.v) & 0x7fffffffu;
      bits = magnitude > bits ? magnitude : bits;
    }
    AMP_HD uint32_t largest(uint32_t other) const { return other > bits ? other : bits; }
  };
};

AMP_HD Lanes operator+(Lanes a, Lanes b) { return a.v + b.v; }
AMP_HD Lanes operator-(Lanes a, Lanes b) { return a.v - b.v; }
AMP_HD Lanes operator*(Lanes a, Lanes b) { return a.v * b.v; }
AMP_HD Lanes operator/(Lanes a, Lanes b) { return a.v / b.v; }
AMP_HD Lanes fma(Lanes a, Lanes b, Lanes c) { return amp_engine::fma(a.v, b.v, c.v); }
AMP_HD Lanes sqrt(Lanes a) { return amp_engine::sqrt(a.v); }

}  // namespace amp_engine::cpu::portable
