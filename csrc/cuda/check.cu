// Maps the elements of a list of tensors, and sums the inputs.
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace amp_engine::cuda {
namespace {

struct Factors {
  float a, b;
};

// The kinds of work that a kernel does with x.
struct Check {
  static constexpr bool kSums = true, kWrites = false, kMixes = false;
};
struct Scale {
  static constexpr bool kSums = false, kWrites = true, kMixes = false;
};
struct ScaleAndCheck {
  static constexpr bool kSums = true, kWrites = true, kMixes = false;
};
struct Mix {
  static constexpr bool kSums = false, kWrites = true, kMixes = true;
};
struct MixAndCheck {
  static constexpr bool kSums = true, kWrites = true, kMixes = true;
};

template <class Work>
AMP_DEVICE Factors factors_of(CheckArgs const& args) {
  return {factor_a<!Work::kSums && !Work::kMixes>(args), args.b ? *args.b : 1.0f};
}

// The number of shares that are loaded before the first one is used. With all resident blocks, these are twice the
// bytes that memory delivers during one load: docs/cuda_kernels.md.
template <class Work>
AMP_DEVICE constexpr int shares_of(Type type) {
  return (type == Type::float32 ? 2 : 4) / (Work::kMixes ? 2 : 1);
}

// Computes out = x * a, or fma(a, x, b * y), and the sums of x, which has type kType, from `first` on as far as the map
// goes. Returns the index after the last element.
template <class Work, class Map, Type kType>
AMP_DEVICE int map_shares(ListRow const& row, Chunk chunk, Factors factors, int first, int n, Leaf& leaf) {
  constexpr int kShares = shares_of<Work>(kType);
  List const x(row.x.data, kType, chunk.index);
  List const y(row.y.data, row.y.type, chunk.index);
  List const out(row.out.data, row.out.type, chunk.index);
#pragma unroll 1
  for (; Map::kWhole ? first + kShares * kStride <= n : first < n; first += kShares * kStride) {
    Raw raw[kShares];
    Raw raw_y[kShares];
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      raw[s] = Map::load(x, kType, first + s * kStride, n);
    }
    if constexpr (Work::kMixes) {
#pragma unroll
      for (int s = 0; s < kShares; ++s) {
        raw_y[s] = Map::load(y, y.type, first + s * kStride, n);
      }
    }
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      Floats values = Map::widened(raw[s], kType);
      if constexpr (Work::kSums) {
        leaf.add<Map>(raw[s], values, kType);
      }
      if constexpr (Work::kWrites) {
        if constexpr (Work::kMixes) {
          Floats const other = Map::widened(raw_y[s], y.type);
#pragma unroll
          for (int k = 0; k < kShare; ++k) {
            values.at[k] = fma(factors.a, values.at[k], factors.b * other.at[k]);
          }
        } else {
#pragma unroll
          for (int k = 0; k < kShare; ++k) {
            values.at[k] = values.at[k] * factors.a;
          }
        }
        if (row.out.data) {
          Map::store(out, out.type, first + s * kStride, n, values);
        }
      }
    }
  }
  return first;
}

template <class Work, Type kType>
AMP_DEVICE void map_chunk(CheckArgs const& args, ListRow const& row, Chunk chunk) {
  Factors const factors = factors_of<Work>(args);
  int const n = elements_of(chunk.index, row.numel);
  Leaf leaf;
  int first = 0;
  if (List(row.x.data, kType, chunk.index).has_quads() &&
      (!Work::kMixes || List(row.y.data, row.y.type, chunk.index).has_quads()) &&
      (!Work::kWrites || List(row.out.data, row.out.type, chunk.index).has_quads())) {
    first = map_shares<Work, Quads, kType>(row, chunk, factors, first, n, leaf);
    if constexpr (Work::kSums) {
      leaf.hand_over<Quads, Singles>();
    }
  }
  map_shares<Work, Singles, kType>(row, chunk, factors, first, n, leaf);
  if constexpr (Work::kSums) {
    Partial const partial = leaf.sum(kType);
    if (threadIdx.x == 0) {
      args.partials[blockIdx.x] = partial;
    }
  }
}

// One loop per type, because a loop for all types would need float32's registers for float16's loads.
template <class Work>
AMP_DEVICE void map_any(CheckArgs const& args, ListRow const& row, Chunk chunk) {
  if (row.x.type == Type::float32) {
    map_chunk<Work, Type::float32>(args, row, chunk);
  } else if (row.x.type == Type::float16) {
    map_chunk<Work, Type::float16>(args, row, chunk);
  } else {
    map_chunk<Work, Type::bfloat16>(args, row, chunk);
  }
}

template <class Work>
__global__ void __launch_bounds__(kThreads, Work::kWrites ? 4 : 5) map(CheckArgs const args) {
  Chunk const chunk = args.chunks[blockIdx.x];
  ListRow const row = row_of(args, chunk.tensor);
  if (!row.x.data) {
    return;
  }
  if constexpr (Work::kMixes) {
    if (!row.y.data) {
      return map_any<std::conditional_t<Work::kSums, ScaleAndCheck, Scale>>(args, row, chunk);
    }
  }
  map_any<Work>(args, row, chunk);
}

AMP_DEVICE void sum_up_list(CheckArgs const& args) {
  double const sum = sum_list(args.n_tensors, [&](int64_t t) { return args.sums.sum_squares[t]; });
  if (threadIdx.x == 0) {
    *args.norm = norm_of(args, sum);
  }
}

// All work after the map, in one block.
__global__ void __launch_bounds__(kListThreads) conclude(CheckArgs const args) {
  auto const leaves_of = [&](int64_t t) { return args.x[t] ? int64_t(args.shapes[t].n_chunks) : 0; };
  for (int64_t first = 0; first < args.n_chunks; first += kListThreads) {
    // Shifts by one warp in each round: segments begin at every eighth warp, so the same four warps would do all work.
    int64_t const mine = first + (threadIdx.x + first / kListThreads * 32) % kListThreads;
    sum_segments(args.partials, args.chunks, args.n_chunks, mine, leaves_of);
  }
  __syncthreads();
  bool nonfinite = false;
  for (int64_t t = threadIdx.x; t < args.n_tensors; t += kListThreads) {
    Partial const sum = sum_tensor(args.partials + args.shapes[t].first_chunk, leaves_of(t));
    args.sums.sum_squares[t] = sum.sum_squares;
    args.sums.largest[t] = sum.largest;
    args.sums.nonfinite[t] = sum.nonfinite != 0;
    nonfinite |= sum.nonfinite != 0;
  }
  nonfinite = __syncthreads_or(nonfinite);
  if (args.found_inf && nonfinite && threadIdx.x == 0) {
    *args.found_inf = 1.0f;
  }
  if (args.norm) {
    sum_up_list(args);
  }
  if (args.update.state.scale && threadIdx.x == 0) {
    amp_engine::update_scale(args.update);
  }
}

__global__ void move_scale(ScaleUpdate const update) { amp_engine::update_scale(update); }

}  // namespace

void check(CheckArgs const& args, cudaStream_t stream) {
  if (!args.checked) {
    launch(args.y ? map<Mix> : map<Scale>, args.n_chunks, kThreads, stream, args);
    return;
  }
  launch(args.y ? map<MixAndCheck> : args.out ? map<ScaleAndCheck> : map<Check>, args.n_chunks, kThreads, stream, args);
  launch(conclude, 1, kListThreads, stream, args);
}

void update_scale(ScaleUpdate const& update, cudaStream_t stream) { launch(move_scale, 1, 1, stream, update); }

}  // namespace amp_engine::cuda
