// check and axpby: map a list of tensors and sum it up.
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace amp_engine::cuda {
namespace {

struct Factors {
  float a, b;
};

AMP_DEVICE Factors factors_of(CheckArgs const& args) {
  return {!args.a ? 1.0f : args.reciprocal ? reciprocal(*args.a) : *args.a, args.b ? *args.b : 1.0f};
}

// out = x * a, or fma(a, x, b * y) where there is a y.
AMP_DEVICE void write(ListRow const& row, uint32_t chunk, Factors factors, int i, int count, Floats x) {
  if (row.y.data) {
    List const list(row.y.data, row.y.type, chunk);
    Floats const y = widened(list.load(i, count), row.y.type);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      x.at[k] = fma(factors.a, x.at[k], factors.b * y.at[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kOctet; ++k) {
      x.at[k] = x.at[k] * factors.a;
    }
  }
  List const out(row.out.data, row.out.type, chunk);
  out.store(i, count, rounded(x, row.out.type));
}

template <bool kSums, bool kWrites>
AMP_DEVICE void map_chunk(CheckArgs const& args, ListRow const& row, Chunk chunk) {
  // As many octets of 16 bits are loaded before the first of them is used, and of 32. More spill on sm_80.
  constexpr int kBatch16 = kWrites && kSums ? 2 : 4;
  constexpr int kBatch32 = kWrites && kSums ? 2 : 2;
  Factors const factors = factors_of(args);
  List const x(row.x.data, row.x.type, chunk.index);
  int const n = elements_of(chunk.index, row.numel);
  Leaf leaf;
  auto const take = [&](Raw const& raw, Type type, int i, int count) {
    Floats const values = widened(raw, type);
    if constexpr (kSums) {
      leaf.add(raw, values, type);
    }
    if constexpr (kWrites) {
      write(row, chunk.index, factors, i, count, values);
    }
  };
  int i = int(threadIdx.x) * kOctet;
  // A loop for each type: in one for all an octet of 16 bits would keep the registers of one of 32.
  auto const take_wide = [&]<int kCount, Type kType>() {
    for (; i + (kCount - 1) * kStride + kOctet <= n; i += kCount * kStride) {
      Raw raw[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        raw[k] = x.load_octet<kType>(i + k * kStride);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        take(raw[k], kType, i + k * kStride, kOctet);
      }
    }
  };
  if (x.wide && x.type == Type::float32) {
    take_wide.template operator()<kBatch32, Type::float32>();
  } else if (x.wide && x.type == Type::float16) {
    take_wide.template operator()<kBatch16, Type::float16>();
  } else if (x.wide) {
    take_wide.template operator()<kBatch16, Type::bfloat16>();
  }
#pragma unroll 1
  for (; i < n; i += kStride) {
    int const count = octet_size(i, n);
    take(x.load(i, count), x.type, i, count);
  }
  if constexpr (kSums) {
    Partial const partial = leaf.sum(x.type);
    if (threadIdx.x == 0) {
      args.partials[blockIdx.x] = partial;
    }
  }
}

template <bool kSums, bool kWrites>
__global__ void __launch_bounds__(kThreads, kWrites ? 3 : 5) map(CheckArgs const args) {
  Chunk const chunk = args.chunks[blockIdx.x];
  ListRow const row = args.rows[chunk.tensor];
  if (!row.x.data) {
    return;
  }
  if (kWrites && row.out.data) {
    map_chunk<kSums, true>(args, row, chunk);
  } else if (kSums) {
    map_chunk<kSums, false>(args, row, chunk);
  }
}

struct ListTable {
  ListRow const* rows;
  AMP_DEVICE int64_t leaves(int64_t t) const { return rows[t].x.data ? rows[t].n_chunks : 0; }
};

__global__ void __launch_bounds__(kThreads) segments(CheckArgs const args) {
  sum_segments(args.partials, args.chunks, args.n_chunks, int64_t(blockIdx.x) * kThreads + threadIdx.x,
               ListTable{args.rows});
}

__global__ void __launch_bounds__(kListThreads) total(CheckArgs const args) {
  ListTable const table{args.rows};
  bool nonfinite = false;
  for (int64_t t = threadIdx.x; t < args.n_tensors; t += kListThreads) {
    Partial const sum = sum_tensor(args.partials + args.rows[t].first_chunk, table.leaves(t));
    args.sums.sum_squares[t] = sum.sum_squares;
    args.sums.largest[t] = sum.largest;
    args.sums.nonfinite[t] = sum.nonfinite != 0;
    nonfinite |= sum.nonfinite != 0;
  }
  nonfinite = __syncthreads_or(nonfinite);
  if (args.found_inf && nonfinite && threadIdx.x == 0) {
    *args.found_inf = 1.0f;
  }
  if (!args.total && !args.norm) {
    return;
  }
  double const sum = sum_list(args.n_tensors, [&](int64_t t) { return args.sums.sum_squares[t]; });
  if (threadIdx.x == 0) {
    if (args.total) {
      *args.total = sum;
    }
    if (args.norm) {
      *args.norm = float(::sqrt(sum) * (args.norm_scale ? 1.0 / double(*args.norm_scale) : 1.0));
    }
  }
}

__global__ void move_scale(ScaleState const state, ScaleRule const rule) { amp_engine::update_scale(state, rule); }

}  // namespace

void check(CheckArgs const& args, cudaStream_t stream) {
  if (!args.partials) {
    return launch(map<false, true>, args.n_chunks, kThreads, stream, args);
  }
  launch(args.writes ? map<true, true> : map<true, false>, args.n_chunks, kThreads, stream, args);
  launch(segments, (args.n_chunks + kThreads - 1) / kThreads, kThreads, stream, args);
  launch(total, 1, kListThreads, stream, args);
}

void axpby(CheckArgs const& args, cudaStream_t stream) { check(args, stream); }

void update_scale(ScaleState const& state, ScaleRule const& rule, cudaStream_t stream) {
  launch(move_scale, 1, 1, stream, state, rule);
}

}  // namespace amp_engine::cuda
