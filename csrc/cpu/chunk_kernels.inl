// The chunk kernels over lanes of type `Lanes`. The including file defines `Lanes`, and SET, the name of the
// instruction set. Lanes::kWidth must divide kAccumulators.

#include "cpu/chunk_kernels.h"
#include "math/optimizers.h"

namespace amp_engine::cpu::SET {
namespace {

// Otherwise the functions of Lanes would hide these.
using amp_engine::fma;
using amp_engine::sqrt;

// A lane of one element, for the end of a chunk, and for blocks with a NaN.
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
  static Noise of_weight(Noise noise) { return noise >> 24; }
  using BlockNoise = amp_engine::BlockNoise;
  static BlockNoise noise_in_block(int64_t block, int first, uint32_t of_step) {
    return amp_engine::noise_in_block(block, first, of_step);
  }
  static void store_split24(void* rounded, void* remainder, int64_t i, float x, Noise noise) {
    Halves const halves = split24(x, noise);
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

template <class L>
AMP_HD void prefetch_tile(Type type, void const* data, int64_t i) {
  constexpr int64_t kLine = 64;  // bytes of a line of a cache
  for (int64_t j = 0; j < L::Tile::kElements; j += kLine / size_of(type)) {
    prefetch<L>(type, data, i + j);
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
  template <class L>
  AMP_HD void prefetch_tile(Type type, int64_t i) const {
    if (data_ && !streamed_) {
      SET::prefetch_tile<L>(type, data_, i);
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
  template <class Tile>
  AMP_HD Tile load_tile(Type weight_type, Type type, void const* weights, int64_t i) const {
    if (type == Type::byte) {
      return Tile::load_split24(weights, data_, i);
    }
    auto const part = [&](int j) __attribute__((always_inline)) {
      return load<Lanes, Lanes>(weight_type, type, weights, i + j * Lanes::kWidth);
    };
    return Tile::of(part(0), part(1), part(2), part(3));
  }
  template <class Tile>
  AMP_HD void write_tile(Type weight_type, Type type, void* weights, int64_t i, Tile const& weight,
                         typename Tile::Pairs const& pairs) const {
    if (type == Type::byte) {
      weight.store_split24(weights, data_, i, pairs);
      return;
    }
    Tile const in_order = weight.in_order();
    for (int j = 0; j < 4; ++j) {
      write<Lanes>(weight_type, type, weights, i + j * Lanes::kWidth, in_order.at[j], Lanes::Noise{});
    }
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
  AMP_HD uint8_t* exponent(int64_t i) const { return exponents + uint64_t(i) / kBlock; }
};

// lanes_avx512.h has a type for two blocks.
template <class L>
concept HasTile = requires { typename L::Tile; };

// Steps the tiles from `i` to `end`, and returns where the last one ends. `slow` steps a block of any values.
template <class Update, class L, class Weight, class Gradient, class Rounded, class Slow>
AMP_HD int64_t step_tiles(L, Weight weight_type, Gradient gradient_type, Rounded copy_type, Copy const& copy,
                          void* const weights, void const* const gradients, Blocks const first, Blocks const second,
                          int64_t i, int64_t const end, typename Update::Coefficients const& c, uint32_t of_step,
                          Slow const& slow) {
  using Tile = typename L::Tile;
  bool const has_first = Update::kState2 || first.codes;
  auto const hash = Tile::hash(of_step);
  // A tile waits for a root and a quotient, so it is written while the next one waits.
  Tile weight, state1 = 0.0f, root = 0.0f;
  int64_t waiting = -1;
  auto const write = [&](int64_t at) __attribute__((always_inline)) {
    auto const pairs = Tile::pairs(at, reread(hash));
    typename Tile::Noise const noise(pairs);
    auto const found = Tile::largest(state1, root);
    auto const& largest = reread(found);
    if (has_first) {
      uint8_t* const exponents = first.exponent(at);
      exponents[0] = exponent_of<SignedCode>(largest.at[0]);
      exponents[1] = exponent_of<SignedCode>(largest.at[1]);
      state1.template store_codes<SignedCode>(first.codes, at, &reread(*exponents), noise);
    }
    if constexpr (Update::kState2) {
      uint8_t* const exponents = second.exponent(at);
      exponents[0] = exponent_of<RootCode>(largest.at[2]);
      exponents[1] = exponent_of<RootCode>(largest.at[3]);
      root.template store_codes<RootCode>(second.codes, at, &reread(*exponents), noise);
    }
    copy.write_tile(weight_type, copy_type, weights, at, weight, pairs);
  };
  for (; i + Tile::kElements <= end; i += Tile::kElements) {
    prefetch_tile<L>(gradient_type, gradients, i);
    prefetch_tile<L>(weight_type, weights, i);
    copy.prefetch_tile<L>(copy_type, i);
    Tile w = copy.load_tile<Tile>(weight_type, copy_type, weights, i);
    Tile s1 = 0.0f, s2 = 0.0f, r = 0.0f;
    if (has_first) {
      s1 = Tile::template load_codes<SignedCode>(first.codes, i, first.exponent(i));
    }
    if constexpr (Update::kState2) {
      Tile const before = Tile::template load_codes<RootCode>(second.codes, i, second.exponent(i));
      s2 = before * before;
    }
    Tile const gradient = Tile::load(gradient_type, gradients, i);
    Update::update(gradient, w, s1, s2, reread(c));
    if constexpr (Update::kState2) {
      r = sqrt(s2);  // as the update has it
    }
    if (waiting >= 0) {
      write(waiting);
    }
    waiting = -1;
    if (w.has_nan()) [[unlikely]] {
      slow(i);
      slow(i + kBlock);
      continue;
    }
    weight = w;
    state1 = s1;
    root = r;
    waiting = i;
  }
  if (waiting >= 0) {
    write(waiting);
  }
  return i;
}

// Steps with moments in blocks.
template <class Update>
void step_in_blocks(Row const& r, Entry const& g, Span s, typename Update::Coefficients const& c, uint32_t of_step) {
  Copy const copy(r);
  Blocks const first(r.state1, r.numel), second(r.state2, r.numel);
  bool const has_first = Update::kState2 || r.state1;
  auto const run = [&](auto weight_type, auto gradient_type, auto copy_type) {
    // A block of `count` vectors.
    auto const block = [&](auto lanes, auto count, int64_t begin) {
      using L = decltype(lanes);
      using V = typename ValueOf<L>::type;
      V state1[kBlock / L::kWidth], state2[kBlock / L::kWidth];
      typename L::BlockNoise noise[kBlock / L::kWidth];
      Magnitudes of_1, of_2;
      float const scale1 = has_first ? scale_of(*first.exponent(begin)) : 0.0f;
      float const scale2 = Update::kState2 ? scale_of(*second.exponent(begin)) : 0.0f;
      for (int j = 0; j < count; ++j) {
        int64_t const i = begin + j * L::kWidth;
        prefetch<L>(gradient_type, g.data, i);
        prefetch<L>(weight_type, r.weight, i);
        copy.template prefetch<L>(copy_type, i);
        V weight = copy.template load<L, V>(weight_type, copy_type, r.weight, i);
        state1[j] = has_first ? V(L::template load_code<SignedCode>(first.codes, i, scale1)) : V(0.0f);
        state2[j] = Update::kState2 ? V(L::template load_code<RootCode>(second.codes, i, scale2)) : V(0.0f);
        Update::update(V(L::load(gradient_type, g.data, i)), weight, state1[j], state2[j], c);
        of_1.add(state1[j]);
        if constexpr (Update::kState2) {
          state2[j] = sqrt(state2[j]);
          of_2.add(state2[j]);
        }
        noise[j] = L::noise_in_block(begin / kBlock, j * L::kWidth, of_step);
        copy.template write<L>(weight_type, copy_type, r.weight, i, weight, noise[j].of_weight);
      }
      uint8_t const exponent1 = exponent_of<SignedCode>(of_1.largest());
      uint8_t const exponent2 = exponent_of<RootCode>(of_2.largest());
      if (has_first) {
        *first.exponent(begin) = exponent1;
      }
      if constexpr (Update::kState2) {
        *second.exponent(begin) = exponent2;
      }
      for (int j = 0; j < count; ++j) {
        int64_t const i = begin + j * L::kWidth;
        if (has_first) {
          L::template store_code<SignedCode>(first.codes, i, state1[j], inverse_scale_of(exponent1), noise[j].first);
        }
        if constexpr (Update::kState2) {
          L::template store_code<RootCode>(second.codes, i, state2[j], inverse_scale_of(exponent2), noise[j].second);
        }
      }
    };
    if constexpr (HasTile<Lanes>) {
      auto const slow = [&](int64_t begin) __attribute__((noinline)) { block(Single{}, kBlock, begin); };
      s.begin = step_tiles<Update>(Lanes{}, weight_type, gradient_type, copy_type, copy, r.weight, g.data, first,
                                   second, s.begin, s.end, c, of_step, slow);
    } else {
      for (; s.begin + kBlock <= s.end; s.begin += kBlock) {
        block(Lanes{}, std::integral_constant<int, kBlock / Lanes::kWidth>{}, s.begin);
      }
    }
    for (; s.begin < s.end; s.begin += kBlock) {
      int64_t const left = s.end - s.begin;
      block(Single{}, int(left < kBlock ? left : kBlock), s.begin);
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
      copy.template write<L>(weight_type, copy_type, r.weight, i, weight, L::of_weight(noise));
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
    copy.write<L>(r.weight_type, r.copy_type, r.weight, i, weight, L::of_weight(L::noise(i, of_step)));
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
