// The common parts of the step kernels.
#pragma once

#include "../backend.h"
#include "cuda/share.cuh"

namespace amp_engine::cuda {

AMP_DEVICE double learning_rate(Group const& group) {
  return group.lr_on_device ? double(float_of(load_4(group.lr_on_device))) : group.lr;
}

// Kernels with one thread per tensor have small blocks, so that float64 arithmetic for a thousand tensors uses eight
// multiprocessors, not four.
constexpr int kPrepareThreads = 128;

inline int64_t prepare_blocks(StepArgs const& args) { return (args.n_tensors + kPrepareThreads - 1) / kPrepareThreads; }

// Calls body(t, group) if the thread has a tensor t that is stepped.
template <class Body>
AMP_DEVICE void for_tensor_of_thread(StepArgs const& args, Body const& body) {
  int64_t const t = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (t < args.n_tensors && !is_skipped(args) && args.gradients[t]) {
    Group const group = args.groups[args.rows[t].group];
    body(t, group);
  }
}

// The lists of one chunk that is updated.
struct Lists {
  List gradient, weight, copy, state1, state2;
  bool has_state1, has_copy, adopts;

  AMP_DEVICE Lists(Row const& row, Entry const& gradient, uint32_t chunk, Type state_type = Type::float32)
      : gradient(gradient.data, gradient.type, chunk),
        weight(row.weight, row.weight_type, chunk),
        copy(row.copy, row.copy_type, chunk),
        state1(row.state1, state_type, chunk),
        state2(row.state2, state_type, chunk),
        has_state1(row.state1),
        has_copy(row.copy),
        adopts(row.adopts) {}
};

// The remainders of a share as 16 bits.
template <class Map>
AMP_DEVICE auto remainder_share(List const& remainders, int first, int n) {
  if (remainders.type == Type::remainder) {
    return Map::load(remainders, Type::remainder, first, n);
  }
  auto const bytes = Map::load_bytes(remainders, first, n);
  typename Map::Raw halves = {};
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    Map::set_half(halves, k, Map::byte(bytes, k) << 8);
  }
  return halves;
}

// Joins the 16-bit shares of bfloat16 weights and their remainders, which lie in the words as `Map` decides.
template <class Map>
AMP_DEVICE auto joined_share(typename Map::Raw const& rounded, typename Map::Raw const& remainder) {
  typename Map::Floats x;
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    x.at[k] = joined({Map::half(rounded, k), Map::half(remainder, k)});
  }
  return x;
}

// Where a copy is not its weight rounded, other code wrote it: takes it for the weight.
template <class Map>
AMP_DEVICE void adopt(List const& copies, int first, int n, typename Map::Floats& w) {
  auto const written = Map::load(copies, copies.type, first, n);
  auto const values = Map::widened(written, copies.type);
  auto const own = rounded(w, copies.type);
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    w.at[k] = uint16_t(own.word[k / 2] >> k % 2 * 16) == Map::half(written, k) ? w.at[k] : values.at[k];
  }
}

template <class Map>
AMP_DEVICE void store_split(List const& rounded, List const& remainder, int first, int n, typename Map::Floats const& x) {
  typename Map::Raw high = {}, low = {};
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    Halves const halves = split(x.at[k]);
    high.word[k / 2] |= uint32_t(halves.rounded) << k % 2 * 16;
    low.word[k / 2] |= uint32_t(halves.remainder) << k % 2 * 16;
  }
  Map::store_halves(rounded, first, n, high);
  Map::store_halves(remainder, first, n, low);
}

// Stores the moments with stochastic rounding. `first` counts from the chunk's start, element `begin` of the tensor.
template <class Map, class Update>
AMP_DEVICE void store_by_chance(Lists const& lists, int64_t begin, int first, int n, typename Map::Floats const& s1,
                                typename Map::Floats const& s2, uint32_t of_step) {
  typename Map::Raw of_1 = {}, of_2 = {};
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    uint32_t const noise = noise_at(begin + first + Map::position(k), of_step);
    of_1.word[k / 2] |= uint32_t(bf16_by_chance(s1.at[k], noise & 0xffffu)) << k % 2 * 16;
    of_2.word[k / 2] |= uint32_t(bf16_by_chance(s2.at[k], noise >> 16)) << k % 2 * 16;
  }
  if (Update::kState2 || lists.has_state1) {
    Map::store_halves(lists.state1, first, n, of_1);
  }
  if constexpr (Update::kState2) {
    Map::store_halves(lists.state2, first, n, of_2);
  }
}

template <class Map, class Update>
AMP_DEVICE void update_share(Lists const& lists, int first, int n, typename Update::Coefficients const& c) {
  bool const has_state1 = Update::kState1 && lists.has_state1;
  auto const raw_gradient = Map::load(lists.gradient, lists.gradient.type, first, n);
  auto const raw_weight = Map::load(lists.weight, lists.weight.type, first, n);
  typename Map::Raw raw1 = {}, raw2 = {};
  if (has_state1) {
    raw1 = Map::load(lists.state1, Type::float32, first, n);
  }
  if constexpr (Update::kState2) {
    raw2 = Map::load(lists.state2, Type::float32, first, n);
  }
  auto const g = Map::widened(raw_gradient, lists.gradient.type);
  auto w = Map::widened(raw_weight, lists.weight.type);
  if (lists.adopts) {
    adopt<Map>(lists.copy, first, n, w);
  }
  auto s1 = Map::widened(raw1, Type::float32);
  auto s2 = Map::widened(raw2, Type::float32);
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    Update::update(g.at[k], w.at[k], s1.at[k], s2.at[k], c);
  }
  if (has_state1) {
    Map::store(lists.state1, Type::float32, first, n, s1);
  }
  if constexpr (Update::kState2) {
    Map::store(lists.state2, Type::float32, first, n, s2);
  }
  Map::store(lists.weight, lists.weight.type, first, n, w);
  if (lists.has_copy) {
    Map::store(lists.copy, lists.copy.type, first, n, w);
  }
}

// Calls share(map, first) for the shares of a chunk of n elements, in kStride elements each.
template <class Update, class Quads, class Singles, class Share>
AMP_DEVICE void for_shares(Lists const& lists, int n, Share const& share) {
  // A list that the optimizer or the tensor does not have starts at null, which counts as aligned.
  bool const quads = lists.gradient.has_quads() && lists.weight.has_quads() && lists.copy.has_quads() &&
                     (!Update::kState1 || lists.state1.has_quads()) && (!Update::kState2 || lists.state2.has_quads());
  int first = 0;
  if (quads) {
#pragma unroll 1
    for (; first + kStride <= n; first += kStride) {
      share(Quads{}, first);
    }
  }
#pragma unroll 1
  for (; first < n; first += kStride) {
    share(Singles{}, first);
  }
}

template <class Update>
AMP_DEVICE void update_chunk(StepArgs const& args, Chunk chunk, Entry const& gradient) {
  Row const row = args.rows[chunk.tensor];
  auto const c = *reinterpret_cast<typename Update::Coefficients const*>(coefficients_of(args, chunk.tensor));
  int const n = elements_of(chunk.index, row.numel);
  Lists const lists(row, gradient, chunk.index);
  for_shares<Update, QuadsOf<kUpdateShare>, SinglesOf<kUpdateShare>>(lists, n, [&](auto map, int first) {
    update_share<decltype(map), Update>(lists, first, n, c);
  });
}

// The moments of a chunk in blocks.
struct Blocks {
  List codes;
  char* exponents;

  AMP_DEVICE Blocks(void* moment, Row const& row, uint32_t chunk)
      : codes(moment, Type::byte, chunk),
        exponents(static_cast<char*>(moment) + row.numel + int64_t(chunk) * (kChunk / kBlock)) {}

  template <class Map>
  AMP_DEVICE char* exponent(int first, int k) const {
    return exponents + (first + Map::position(k)) / kBlock;
  }
};

template <class Map, class Code>
AMP_DEVICE auto load_moment(Blocks const& blocks, int first, int n) {
  typename Map::Raw const codes = Map::load_bytes(blocks.codes, first, n);
  typename Map::Floats x;
  float scale = 0.0f;
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    if (k % Map::kInBlock == 0) {
      scale = scale_of(uint8_t(load_1_if(first + Map::position(k) < n, blocks.exponent<Map>(first, k))));
    }
    x.at[k] = decoded<Code>(Map::byte(codes, k), scale);
  }
  return x;
}

// Of element k of a share whose first position, a multiple of kStride, is in `block`.
template <class Map>
AMP_DEVICE BlockNoise noise_of(uint32_t block, int k, uint32_t of_step) {
  int const position = Map::position(k);
  return noise_in_block(block + uint32_t(position / kBlock), position % kBlock, of_step);
}

template <class Map, class Code>
AMP_DEVICE void store_moment(Blocks const& blocks, int64_t begin, int first, int n, typename Map::Floats x,
                             uint32_t of_step) {
  uint32_t const block = uint32_t((begin + first) / kBlock);
  typename Map::Raw codes = {};
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    x.at[k] = Code::kOfRoot ? sqrt(x.at[k]) : x.at[k];
  }
#pragma unroll
  for (int k = 0; k < Map::kShare; k += Map::kInBlock) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = k; j < k + Map::kInBlock; ++j) {
      uint32_t const magnitude = bits_of(x.at[j]) & 0x7fffffffu;
      largest = first + Map::position(j) < n && magnitude > largest ? magnitude : largest;
    }
#pragma unroll
    for (int distance = Map::kThreadsOfBlock / 2; distance > 0; distance /= 2) {
      uint32_t const other = __shfl_xor_sync(kWarp, largest, distance);
      largest = other > largest ? other : largest;
    }
    uint8_t const exponent = exponent_of<Code>(largest);
    float const inverse_scale = inverse_scale_of(exponent);
    bool const is_first = threadIdx.x % Map::kThreadsOfBlock == 0;
    store_1_if(is_first && first + Map::position(k) < n, blocks.exponent<Map>(first, k), exponent);
#pragma unroll
    for (int j = k; j < k + Map::kInBlock; ++j) {
      BlockNoise const noise = noise_of<Map>(block, j, of_step);
      Map::set_byte(codes, j, encoded<Code>(x.at[j], inverse_scale, Code::kOfRoot ? noise.second : noise.first));
    }
  }
  Map::store_bytes(blocks.codes, first, n, codes);
}

// Like update_share, for tables in which weights have remainders, or moments are narrow. The other kernels have no
// registers to spare for it.
template <class Map, class Update>
AMP_DEVICE void update_narrow_share(Lists const& lists, Blocks const& blocks1, Blocks const& blocks2, int64_t begin,
                                    int first, int n, typename Update::Coefficients const& c, uint32_t of_step) {
  using Raw = typename Map::Raw;
  using Floats = typename Map::Floats;
  bool const has_state1 = Update::kState1 && lists.has_state1;
  Type const state_type = lists.state1.type;
  bool const in_blocks = kNarrowState<Update> && state_type == Type::byte;
  bool const is_byte = lists.copy.type == Type::byte, is_split = is_remainder(lists.copy.type);
  auto const raw_gradient = Map::load(lists.gradient, lists.gradient.type, first, n);
  auto const raw_weight = Map::load(lists.weight, lists.weight.type, first, n);
  Raw const rest = is_split ? remainder_share<Map>(lists.copy, first, n) : Raw{};
  auto const g = Map::widened(raw_gradient, lists.gradient.type);
  Floats w = is_split ? joined_share<Map>(raw_weight, rest) : Map::widened(raw_weight, lists.weight.type);
  if (lists.adopts) {
    adopt<Map>(lists.copy, first, n, w);
  }
  Floats s1 = {}, s2 = {};
  if (in_blocks) {
    if (has_state1) {
      s1 = load_moment<Map, SignedCode>(blocks1, first, n);
    }
    if constexpr (Update::kState2) {
      s2 = load_moment<Map, RootCode>(blocks2, first, n);
    }
  } else {
    if (has_state1) {
      s1 = Map::widened(Map::load(lists.state1, state_type, first, n), state_type);
    }
    if constexpr (Update::kState2) {
      s2 = Map::widened(Map::load(lists.state2, state_type, first, n), state_type);
    }
  }
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    Update::update(g.at[k], w.at[k], s1.at[k], s2.at[k], c);
  }
  if (in_blocks) {
    if (has_state1) {
      store_moment<Map, SignedCode>(blocks1, begin, first, n, s1, of_step);
    }
    if constexpr (Update::kState2) {
      store_moment<Map, RootCode>(blocks2, begin, first, n, s2, of_step);
    }
  } else if (kNarrowState<Update> && state_type != Type::float32) {
    store_by_chance<Map, Update>(lists, begin, first, n, s1, s2, of_step);
  } else {
    if (has_state1) {
      Map::store(lists.state1, Type::float32, first, n, s1);
    }
    if constexpr (Update::kState2) {
      Map::store(lists.state2, Type::float32, first, n, s2);
    }
  }
  if (is_byte) {
    Raw high = {}, low = {};
#pragma unroll
    for (int k = 0; k < Map::kShare; ++k) {
      uint32_t const noise = in_blocks ? noise_of<Map>(uint32_t((begin + first) / kBlock), k, of_step).of_weight
                                       : noise_at(begin + first + Map::position(k), of_step) >> 24;
      Halves const halves = split24(w.at[k], noise);
      high.word[k / 2] |= uint32_t(halves.rounded) << k % 2 * 16;
      Map::set_byte(low, k, halves.remainder);
    }
    Map::store_halves(lists.weight, first, n, high);
    Map::store_bytes(lists.copy, first, n, low);
  } else if (is_split) {
    store_split<Map>(lists.weight, lists.copy, first, n, w);
  } else {
    Map::store(lists.weight, lists.weight.type, first, n, w);
    if (lists.has_copy) {
      Map::store(lists.copy, lists.copy.type, first, n, w);
    }
  }
}

// Narrow elements have few bytes: a thread has eight, so that as much is in flight as with wider ones.
template <class Update>
AMP_DEVICE void update_narrow_chunk(StepArgs const& args, Chunk chunk, Entry const& gradient) {
  Row const row = args.rows[chunk.tensor];
  auto const c = *reinterpret_cast<typename Update::Coefficients const*>(coefficients_of(args, chunk.tensor));
  int const n = elements_of(chunk.index, row.numel);
  Lists const lists(row, gradient, chunk.index, row.state_type);
  Blocks const blocks1(row.state1, row, chunk.index), blocks2(row.state2, row, chunk.index);
  int64_t const begin = int64_t(chunk.index) * kChunk;
  uint32_t const of_step = mixed(uint32_t(int64_t(args.steps[chunk.tensor])));
  for_shares<Update, Quads, Singles>(lists, n, [&](auto map, int first) {
    update_narrow_share<decltype(map), Update>(lists, blocks1, blocks2, begin, first, n, c, of_step);
  });
}

void lamb(StepArgs const& args, cudaStream_t stream);

}  // namespace amp_engine::cuda
