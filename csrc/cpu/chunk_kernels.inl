// The chunk kernels over lanes of type `Lanes`. The including file defines `Lanes`, and SET, the name of the
// instruction set. Lanes::kWidth must divide kAccumulators.

#include "cpu/chunk_kernels.h"
#include "math/optimizers.h"

namespace amp_engine::cpu::SET {
namespace {

// Otherwise the functions of Lanes would hide these.
using amp_engine::fma;
using amp_engine::sqrt;

// A lane of one element, for the end of a chunk.
struct Single {
  static constexpr int kWidth = 1;

  static float load(Type type, void const* data, int64_t i) {
    return type == Type::float32 ? static_cast<float const*>(data)[i]
                                 : widened(static_cast<uint16_t const*>(data)[i], type);
  }
  static void store(Type type, void* data, int64_t i, float x) {
    if (type == Type::float32) {
      static_cast<float*>(data)[i] = x;
    } else {
      static_cast<uint16_t*>(data)[i] = type == Type::float16 ? f16_from_float(x) : bf16_from_float(x);
    }
  }
  static void stream(Type type, void* data, int64_t i, float x) { store(type, data, i, x); }

  // This function and those below call math/halves.h and math/blocks.h.
  static float load_split(void const* rounded, void const* remainder, int64_t i) {
    return joined({static_cast<uint16_t const*>(rounded)[i], static_cast<uint16_t const*>(remainder)[i]});
  }
  static void store_split(void* rounded, void* remainder, int64_t i, float x) {
    Halves const halves = split(x);
    static_cast<uint16_t*>(rounded)[i] = halves.rounded;
    static_cast<uint16_t*>(remainder)[i] = halves.remainder;
  }
  static float load_split24(void const* rounded, void const* remainder, int64_t i) {
    uint32_t const low = static_cast<uint8_t const*>(remainder)[i];
    return joined({static_cast<uint16_t const*>(rounded)[i], uint16_t(low << 8)});
  }

  using Noise = uint32_t;
  static Noise noise(int64_t i, uint32_t of_step) { return noise_at(i, of_step); }
  static void store_split24(void* rounded, void* remainder, int64_t i, float x, Noise noise) {
    Halves const halves = split24(x, noise >> 24);
    static_cast<uint16_t*>(rounded)[i] = halves.rounded;
    static_cast<uint8_t*>(remainder)[i] = uint8_t(halves.remainder);
  }
  template <class Code>
  static float load_code(void const* codes, int64_t i, float scale) {
    return decoded<Code>(static_cast<uint8_t const*>(codes)[i], scale);
  }
  template <class Code>
  static void store_code(void* codes, int64_t i, float x, float inverse_scale, Noise noise) {
    static_cast<uint8_t*>(codes)[i] = encoded<Code>(x, inverse_scale, noise);
  }
  template <int kShift>
  static void store_by_chance(void* data, int64_t i, float x, Noise noise) {
    static_cast<uint16_t*>(data)[i] = bf16_by_chance(x, noise >> kShift & 0xffffu);
  }
};

template <class L>
struct ValueOf {
  using type = L;
};
template <>
struct ValueOf<Single> {
  using type = float;
};

// Prefetches memory, also past the end of a page, where the hardware prefetcher stops. This saves 5 to 10% of the time
// with five streams, and up to 22% with one stream that is only written. The default distance is 1 KB: a whole page
// takes 4% longer, because it shares its sets of the L1 cache with the data that is being read. An address past the end
// of the data is no error. Do not call this with null: looking up an unmapped page can take longer than all else.
template <class L>
AMP_HD void prefetch(Type type, void const* data, int64_t i, int64_t bytes_ahead = 1024) {
  if constexpr (L::kWidth > 1) {
    uintptr_t const at = reinterpret_cast<uintptr_t>(data) + uintptr_t(i * size_of(type) + bytes_ahead);
    __builtin_prefetch(reinterpret_cast<void const*>(at));
  }
}

// The low-precision copy that a weight is rounded into, if there is one, or the weight's remainder. A streamed copy is
// not read before it is written, which saves 2 of 32 bytes per element, 1 to 2% of a step. But the next forward misses
// the caches. A copy that other code may write is read: where it is not the weight rounded, it is the weight.
class Copy {
 public:
  explicit Copy(Row const& row)
      : data_(row.copy),
        streamed_(row.copy && row.streamed && !row.adopts && !is_remainder(row.copy_type) &&
                  reinterpret_cast<uintptr_t>(row.copy) % sizeof(Lanes) == 0),
        adopts_(row.adopts) {}
  Copy(Copy const&) = delete;
  ~Copy() {
    if (streamed_) {
      Lanes::fence();
    }
  }

  template <class L>
  AMP_HD void prefetch(Type type, int64_t i) const {
    if (data_ && !streamed_) {
      SET::prefetch<L>(type, data_, i);
    }
  }
  template <class L, class V>
  AMP_HD V load(Type weight_type, Type type, void const* weights, int64_t i) const {
    if (type == Type::remainder) {
      return L::load_split(weights, data_, i);
    }
    if (type == Type::byte) {
      return L::load_split24(weights, data_, i);
    }
    V const weight = L::load(weight_type, weights, i);
    return adopts_ ? adopted<L, V>(type, i, weight) : weight;
  }
  template <class L, class V>
  AMP_HD void write(Type weight_type, Type type, void* weights, int64_t i, V weight, typename L::Noise noise) const {
    if (type == Type::remainder) {
      L::store_split(weights, data_, i, weight);
      return;
    }
    if (type == Type::byte) {
      L::store_split24(weights, data_, i, weight, noise);
      return;
    }
    L::store(weight_type, weights, i, weight);
    if (data_ && streamed_) {
      L::stream(type, data_, i, weight);
    } else if (data_) {
      L::store(type, data_, i, weight);
    }
  }
  template <class Block>
  AMP_HD Block load_block(Type weight_type, Type type, void const* weights, int64_t i) const {
    if (type == Type::byte) {
      return Block::load_split24(weights, data_, i);
    }
    return Block::of(load<Lanes, Lanes>(weight_type, type, weights, i),
                     load<Lanes, Lanes>(weight_type, type, weights, i + Lanes::kWidth));
  }
  template <class Block>
  AMP_HD void write_block(Type weight_type, Type type, void* weights, int64_t i, Block const& weight,
                          typename Block::Noise const& noise) const {
    if (type == Type::byte) {
      weight.store_split24(weights, data_, i, noise);
      return;
    }
    Lanes::Noise const none{};
    write<Lanes>(weight_type, type, weights, i, weight.lower(), none);
    write<Lanes>(weight_type, type, weights, i + Lanes::kWidth, weight.upper(), none);
  }

 private:
  template <class L, class V>
  AMP_HD V adopted(Type type, int64_t i, V weight) const {
    alignas(64) uint16_t rounded[L::kWidth];
    L::store(type, rounded, 0, weight);
    auto const* const copy = static_cast<uint16_t const*>(data_) + i;
    if (std::memcmp(rounded, copy, sizeof rounded) == 0) {
      return weight;
    }
    alignas(64) float values[L::kWidth];
    L::store(Type::float32, values, 0, weight);
    for (int j = 0; j < L::kWidth; ++j) {
      values[j] = rounded[j] == copy[j] ? values[j] : widened(copy[j], type);
    }
    return L::load(Type::float32, values, 0);
  }

  void* const data_;
  bool const streamed_, adopts_;
};

struct Span {
  int64_t begin, end;
};

inline Span span(int64_t chunk, int64_t numel) {
  int64_t const begin = chunk * kChunk;
  return {begin, begin + kChunk < numel ? begin + kChunk : numel};
}

// Calls body(Lanes{}, i) for whole vectors, then body(Single{}, i) for each remaining element.
template <class Body>
inline __attribute__((always_inline)) void for_each(Span s, Body&& body) {
  int64_t i = s.begin;
  for (; i + Lanes::kWidth <= s.end; i += Lanes::kWidth) {
    body(Lanes{}, i);
  }
  for (; i < s.end; ++i) {
    body(Single{}, i);
  }
}

// The largest bits of |x|. Not part of a Leaf, so that the compiler keeps them in a register.
struct Magnitudes {
  Lanes::Magnitudes lanes;
  uint32_t single;

  AMP_HD Magnitudes() : single(0) {}
  AMP_HD void add(Lanes x) { lanes.add(x); }
  AMP_HD void add(float x) {
    uint32_t const bits = bits_of(x) & 0x7fffffffu;
    single = bits > single ? bits : single;
  }
  AMP_HD uint32_t largest() const { return lanes.largest(single); }
};

// The float accumulators of one leaf. math/reduction.h defines which element goes to which accumulator.
struct Leaf {
  alignas(64) float accumulator[kAccumulators];
  int64_t used;

  // For n elements. Does not clear accumulators that no element reaches.
  AMP_HD explicit Leaf(int64_t n) : used(n < kAccumulators ? (n + kSlots - 1) / kSlots * kSlots : kAccumulators) {
    std::memset(accumulator, 0, size_t(used) * sizeof(float));
  }
  AMP_HD void add(Lanes x, int64_t i) {
    float* const at = accumulator + (uint64_t(i) & (kAccumulators - 1));
    Lanes::store(Type::float32, at, 0, fma(x, x, Lanes::load(Type::float32, at, 0)));
  }
  AMP_HD void add(float x, int64_t i) {
    float* const at = accumulator + (uint64_t(i) & (kAccumulators - 1));
    *at = amp_engine::fma(x, x, *at);
  }
  Partial sum(Magnitudes const& magnitudes) const {
    double lane[kLanes];
    int64_t const lanes = used / kSlots;
    for (int64_t j = 0; j < lanes; ++j) {
      lane[j] = lane_sum(accumulator + j * kSlots);
    }
    uint32_t const bits = magnitudes.largest();
    return {tree_sum(lane, int(lanes)), float_of(bits), bits >= 0x7f800000u};
  }
};

// Adds pairs of rows of kAccumulators elements, and returns the index after the last whole pair. Reading two rows side
// by side takes 10% less time than one after the other. Four or eight rows gained no more. With an output, none gained.
template <Type kType>
inline __attribute__((always_inline)) int64_t add_pairs(void const* data, Span s, Leaf& leaf, Magnitudes& magnitudes) {
  constexpr int64_t kPair = 2 * kAccumulators;
  for (; s.begin + kPair <= s.end; s.begin += kPair) {
    for (int64_t j = 0; j < kAccumulators; j += Lanes::kWidth) {
      Lanes const sum = Lanes::load(Type::float32, leaf.accumulator, j);
      int64_t const i = s.begin + j;
      prefetch<Lanes>(kType, data, i, kPair * size_of(kType));
      prefetch<Lanes>(kType, data, i + kAccumulators, kPair * size_of(kType));
      Lanes const x = Lanes::load(kType, data, i), y = Lanes::load(kType, data, i + kAccumulators);
      Lanes::store(Type::float32, leaf.accumulator, j, fma(y, y, fma(x, x, sum)));
      magnitudes.add(x);
      magnitudes.add(y);
    }
  }
  return s.begin;
}

template <bool kSums>
inline __attribute__((always_inline)) Partial map(ListRow const& row, int64_t chunk, float a, float b) {
  Span s = span(chunk, row.numel);
  Entry const in = row.x, other = row.y, out = row.out;
  Leaf leaf(kSums ? s.end - s.begin : 0);
  Magnitudes magnitudes;
  auto const run = [&](auto&& write) {
    for_each(s, [&](auto lanes, int64_t i) {
      using L = decltype(lanes);
      prefetch<L>(in.type, in.data, i);
      auto const x = L::load(in.type, in.data, i);
      if constexpr (kSums) {
        leaf.add(x, i - s.begin);
        magnitudes.add(x);
      }
      write(lanes, x, i);
    });
  };
  if (!out.data) {
    if constexpr (kSums) {
      s.begin = in.type == Type::float32   ? add_pairs<Type::float32>(in.data, s, leaf, magnitudes)
                : in.type == Type::float16 ? add_pairs<Type::float16>(in.data, s, leaf, magnitudes)
                                           : add_pairs<Type::bfloat16>(in.data, s, leaf, magnitudes);
    }
    run([](auto, auto, int64_t) {});
  } else if (!other.data && row.streamed && out.data != in.data &&
             reinterpret_cast<uintptr_t>(out.data) % sizeof(Lanes) == 0) {
    run([&](auto lanes, auto x, int64_t i) {
      using L = decltype(lanes);
      L::stream(out.type, out.data, i, x * typename ValueOf<L>::type(a));
    });
    Lanes::fence();
  } else if (!other.data) {
    run([&](auto lanes, auto x, int64_t i) {
      using L = decltype(lanes);
      prefetch<L>(out.type, out.data, i);
      L::store(out.type, out.data, i, x * typename ValueOf<L>::type(a));
    });
  } else {
    run([&](auto lanes, auto x, int64_t i) {
      using L = decltype(lanes);
      using V = typename ValueOf<L>::type;
      prefetch<L>(other.type, other.data, i);
      prefetch<L>(out.type, out.data, i);
      V const y = L::load(other.type, other.data, i);
      L::store(out.type, out.data, i, fma(V(a), x, V(b) * y));
    });
  }
  if constexpr (kSums) {
    return leaf.sum(magnitudes);
  }
  return {};
}

Partial check(ListRow const& row, int64_t chunk, float a, float b) { return map<true>(row, chunk, a, b); }
void scale(ListRow const& row, int64_t chunk, float a, float b) { map<false>(row, chunk, a, b); }

// A type as a compile-time constant.
template <Type kType>
struct Known {
  constexpr operator Type() const { return kType; }
};

// The codes of a moment, and the exponents of their blocks.
struct Blocks {
  uint8_t *codes, *exponents;

  Blocks(void* moment, int64_t numel)
      : codes(static_cast<uint8_t*>(moment)), exponents(moment ? codes + numel : nullptr) {}

  AMP_HD float scale(int64_t i) const { return codes ? scale_of(exponents[uint64_t(i) / kBlock]) : 0.0f; }
  // Returns the inverse of the new scale.
  template <class Code>
  AMP_HD float rescale(int64_t i, uint32_t largest) const {
    uint8_t const exponent = exponent_of<Code>(largest);
    exponents[uint64_t(i) / kBlock] = exponent;
    return inverse_scale_of(exponent);
  }
};

// lanes_avx512.h has a type for a whole block.
template <class L>
concept HasBlock = requires { typename L::Block; };

template <class Block>
struct Stepped {
  Block weight;
  typename Block::Noise noise;
};

// Steps with moments in blocks.
template <class Update>
void step_in_blocks(Row const& r, Entry const& g, Span s, typename Update::Coefficients const& c, uint32_t of_step) {
  Copy const copy(r);
  Blocks const first(r.state1, r.numel), second(r.state2, r.numel);
  bool const has_first = Update::kState2 || r.state1;
  auto const run = [&](auto weight_type, auto gradient_type, auto copy_type) {
    // `count` vectors. `noise` is of each.
    auto const block = [&](auto lanes, auto count, int64_t begin, auto const* noise) {
      using L = decltype(lanes);
      using V = typename ValueOf<L>::type;
      V state1[kBlock / L::kWidth], state2[kBlock / L::kWidth];
      Magnitudes of_1, of_2;
      float const scale1 = first.scale(begin), scale2 = second.scale(begin);
      for (int j = 0; j < count; ++j) {
        int64_t const i = begin + j * L::kWidth;
        prefetch<L>(gradient_type, g.data, i);
        prefetch<L>(weight_type, r.weight, i);
        copy.template prefetch<L>(copy_type, i);
        V weight = copy.template load<L, V>(weight_type, copy_type, r.weight, i);
        state1[j] = has_first ? V(L::template load_code<SignedCode>(first.codes, i, scale1)) : V(0.0f);
        state2[j] = Update::kState2 ? V(L::template load_code<UnsignedCode>(second.codes, i, scale2)) : V(0.0f);
        Update::update(V(L::load(gradient_type, g.data, i)), weight, state1[j], state2[j], c);
        of_1.add(state1[j]);
        of_2.add(state2[j]);
        copy.template write<L>(weight_type, copy_type, r.weight, i, weight, noise[j]);
      }
      float const inverse1 = has_first ? first.template rescale<SignedCode>(begin, of_1.largest()) : 0.0f;
      float const inverse2 = Update::kState2 ? second.template rescale<UnsignedCode>(begin, of_2.largest()) : 0.0f;
      for (int j = 0; j < count; ++j) {
        int64_t const i = begin + j * L::kWidth;
        if (has_first) {
          L::template store_code<SignedCode>(first.codes, i, state1[j], inverse1, noise[j]);
        }
        if constexpr (Update::kState2) {
          L::template store_code<UnsignedCode>(second.codes, i, state2[j], inverse2, noise[j]);
        }
      }
    };
    auto const whole = [&](auto lanes, int64_t begin) {
      using L = decltype(lanes);
      constexpr int kCount = kBlock / L::kWidth;
      typename L::Noise noise[kCount];
      for (int j = 0; j < kCount / 2; ++j) {
        noise[j] = L::noise(begin / 2 + j * L::kWidth, of_step);
        noise[j + kCount / 2] = L::turned(noise[j]);
      }
      block(lanes, std::integral_constant<int, kCount>{}, begin, noise);
    };
    // Returns the weight and the noise to write it with.
    auto const whole_at_once = [&](auto lanes, int64_t begin) __attribute__((always_inline)) {
      using Block = typename decltype(lanes)::Block;
      for (int64_t i = begin; i < begin + kBlock; i += Lanes::kWidth) {
        prefetch<Lanes>(gradient_type, g.data, i);
        prefetch<Lanes>(weight_type, r.weight, i);
        copy.template prefetch<Lanes>(copy_type, i);
      }
      Block weight = copy.template load_block<Block>(weight_type, copy_type, r.weight, begin);
      Block state1 = 0.0f, state2 = 0.0f;
      if (has_first) {
        state1 = Block::template load_codes<SignedCode>(first.codes, begin, first.scale(begin));
      }
      if constexpr (Update::kState2) {
        state2 = Block::template load_codes<UnsignedCode>(second.codes, begin, second.scale(begin));
      }
      Update::update(Block::load(gradient_type, g.data, begin), weight, state1, state2, c);
      uint32_t largest1, largest2;
      Block::largest(state1, state2, largest1, largest2);
      auto const noise = Block::noise(begin, of_step);
      if (has_first) {
        float const inverse = first.template rescale<SignedCode>(begin, largest1);
        state1.template store_codes<SignedCode>(first.codes, begin, inverse, noise);
      }
      if constexpr (Update::kState2) {
        float const inverse = second.template rescale<UnsignedCode>(begin, largest2);
        state2.template store_codes<UnsignedCode>(second.codes, begin, inverse, noise);
      }
      return Stepped<Block>{weight, noise};
    };
    if constexpr (HasBlock<Lanes>) {
      // A weight waits for a root and a quotient, so it is written after the moments of the next block: 7% less time.
      auto const write = [&](auto const& block) {
        copy.write_block(weight_type, copy_type, r.weight, s.begin, block.weight, block.noise);
        s.begin += kBlock;
      };
      if (s.begin + kBlock <= s.end) {
        auto last = whole_at_once(Lanes{}, s.begin);
        while (s.begin + 2 * kBlock <= s.end) {
          auto const next = whole_at_once(Lanes{}, s.begin + kBlock);
          write(last);
          last = next;
        }
        write(last);
      }
    } else {
      for (; s.begin + kBlock <= s.end; s.begin += kBlock) {
        whole(Lanes{}, s.begin);
      }
    }
    if (s.begin < s.end) {
      uint32_t noise[kBlock];
      for (int64_t i = s.begin; i < s.end; ++i) {
        noise[i - s.begin] = noise_in_block(i, of_step);
      }
      block(Single{}, int(s.end - s.begin), s.begin, noise);
    }
  };
  Known<Type::float32> const f32;
  Known<Type::bfloat16> const bf16;
  Known<Type::byte> const byte;
  if (g.type == bf16 && r.weight_type == bf16 && r.copy_type == byte) {
    run(bf16, bf16, byte);
  } else if (g.type == bf16 && r.weight_type == f32 && r.copy_type == bf16) {
    run(f32, bf16, bf16);
  } else {
    run(r.weight_type, g.type, r.copy_type);
  }
}

template <class Update>
void step(Row const& row, Entry const& gradient, int64_t chunk, void const* coefficients) {
  auto const c = *static_cast<typename Update::Coefficients const*>(coefficients);
  // Local copies: the compiler has to assume that a store to a tensor may change the row.
  Row const r = row;
  Entry const g = gradient;
  Copy const copy(r);
  uint32_t const of_step = step_mixed(coefficients);
  auto const run = [&](auto weight_type, auto gradient_type, auto copy_type, auto state_type) {
    for_each(span(chunk, r.numel), [&](auto lanes, int64_t i) {
      using L = decltype(lanes);
      using V = typename ValueOf<L>::type;
      prefetch<L>(gradient_type, g.data, i);
      prefetch<L>(weight_type, r.weight, i);
      if (r.state1) {
        prefetch<L>(state_type, r.state1, i);
      }
      if constexpr (Update::kState2) {
        prefetch<L>(state_type, r.state2, i);
      }
      copy.template prefetch<L>(copy_type, i);
      V weight = copy.template load<L, V>(weight_type, copy_type, r.weight, i);
      V state1 = r.state1 ? L::load(state_type, r.state1, i) : V(0.0f);
      V state2 = Update::kState2 ? L::load(state_type, r.state2, i) : V(0.0f);
      Update::update(V(L::load(gradient_type, g.data, i)), weight, state1, state2, c);
      auto const noise = L::noise(i, of_step);  // computed only where it is used
      if constexpr (kNarrowState<Update>) {
        if (state_type != Type::float32) {
          if (Update::kState2 || r.state1) {
            L::template store_by_chance<0>(r.state1, i, state1, noise);
          }
          if constexpr (Update::kState2) {
            L::template store_by_chance<16>(r.state2, i, state2, noise);
          }
        }
      }
      if (state_type == Type::float32) {
        if (r.state1) {
          L::store(Type::float32, r.state1, i, state1);
        }
        if constexpr (Update::kState2) {
          L::store(Type::float32, r.state2, i, state2);
        }
      }
      copy.template write<L>(weight_type, copy_type, r.weight, i, weight, noise);
    });
  };
  // The usual types of O2 and O5, of O1 and O4, and of FP32 each have their own loop, which does not branch on types.
  // This takes a quarter to a third less time if the tensors are in the caches.
  Known<Type::float32> const f32;
  Known<Type::float16> const f16;
  Known<Type::bfloat16> const bf16;
  Known<Type::remainder> const rest;
  auto const are = [&](Type gradient, Type copy) {
    return r.weight_type == Type::float32 && g.type == gradient && r.copy_type == copy;
  };
  if constexpr (kNarrowState<Update>) {
    if (r.state_type == Type::byte) {
      step_in_blocks<Update>(r, g, span(chunk, r.numel), c, of_step);
      return;
    }
    if (r.state_type != Type::float32) {
      if (are(bf16, bf16)) {
        run(f32, bf16, bf16, bf16);
      } else if (r.copy_type == rest && g.type == bf16) {
        run(bf16, bf16, rest, bf16);
      } else {
        run(r.weight_type, g.type, r.copy_type, bf16);
      }
      return;
    }
  }
  if (are(f16, f16)) {
    run(f32, f16, f16, f32);
  } else if (are(bf16, bf16)) {
    run(f32, bf16, bf16, f32);
  } else if (are(f32, f16)) {
    run(f32, f32, f16, f32);
  } else if (are(f32, bf16)) {
    run(f32, f32, bf16, f32);
  } else if (are(f32, f32)) {
    run(f32, f32, f32, f32);
  } else if (r.copy_type == rest && g.type == bf16) {
    run(bf16, bf16, rest, f32);
  } else {
    run(r.weight_type, g.type, r.copy_type, f32);
  }
}

void lamb_moments(Row const& row, Entry const& gradient, int64_t chunk, float* steps, void const* coefficients,
                  Partial* of_weight, Partial* of_step) {
  auto const c = *static_cast<LambMoments::Coefficients const*>(coefficients);
  Row const r = row;
  Entry const g = gradient;
  Copy const copy(r);
  Span const s = span(chunk, r.numel);
  Leaf weights(s.end - s.begin), steps_leaf(s.end - s.begin);
  Magnitudes of_weights, of_steps;
  for_each(s, [&](auto lanes, int64_t i) {
    using L = decltype(lanes);
    using V = typename ValueOf<L>::type;
    prefetch<L>(g.type, g.data, i);
    prefetch<L>(r.weight_type, r.weight, i);
    prefetch<L>(Type::float32, r.state1, i);
    prefetch<L>(Type::float32, r.state2, i);
    prefetch<L>(Type::float32, steps, i);
    V const weight = copy.load<L, V>(r.weight_type, r.copy_type, r.weight, i);
    V exp_avg = L::load(Type::float32, r.state1, i);
    V exp_avg_sq = L::load(Type::float32, r.state2, i);
    V const u = LambMoments::step(V(L::load(g.type, g.data, i)), weight, exp_avg, exp_avg_sq, c);
    L::store(Type::float32, r.state1, i, exp_avg);
    L::store(Type::float32, r.state2, i, exp_avg_sq);
    L::store(Type::float32, steps, i, u);
    weights.add(weight, i - s.begin);
    of_weights.add(weight);
    steps_leaf.add(u, i - s.begin);
    of_steps.add(u);
  });
  *of_weight = weights.sum(of_weights);
  *of_step = steps_leaf.sum(of_steps);
}

// The second stage of LAMB: `step` stands in for the gradient, and `coefficients` is one float.
void lamb_apply(Row const& row, Entry const& step, int64_t chunk, void const* coefficients) {
  float const minus_rate = *static_cast<float const*>(coefficients);
  uint32_t const of_step = step_mixed(coefficients);
  Row const r = row;
  Copy const copy(r);
  for_each(span(chunk, r.numel), [&](auto lanes, int64_t i) {
    using L = decltype(lanes);
    using V = typename ValueOf<L>::type;
    prefetch<L>(Type::float32, step.data, i);
    prefetch<L>(r.weight_type, r.weight, i);
    copy.prefetch<L>(r.copy_type, i);
    V const u = L::load(Type::float32, step.data, i);
    V const weight = fma(V(minus_rate), u, copy.load<L, V>(r.weight_type, r.copy_type, r.weight, i));
    copy.write<L>(r.weight_type, r.copy_type, r.weight, i, weight, L::noise(i, of_step));
  });
}

}  // namespace

ChunkKernels const kernels = {
    Lanes::kSet,
    check,
    scale,
    {
#define X(name, type) step<type>,
        AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
            lamb_apply,
    },
    lamb_moments,
};

}  // namespace amp_engine::cpu::SET
