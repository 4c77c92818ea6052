// The orders of math/reduction.h, written for warps and blocks.
#pragma once

#include "cuda/share.cuh"
#include "math/reduction.h"

namespace amp_engine::cuda {

static_assert(kLanes == kThreads && kSlots == kShare);

constexpr uint32_t kWarp = 0xffffffffu;

struct Add {
  template <class T>
  AMP_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  AMP_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// Lane 0 gets the result: lane l takes lane l + offset for 16, 8, 4, 2, 1.
template <class T, class Op>
AMP_DEVICE T reduced_by_warp(T value, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_down_sync(kWarp, value, offset));
  }
  return value;
}

// Thread 0 gets the result: warps as above, then warp w takes warp w + offset for half the warps, a quarter, ..., 1.
// All threads of the block call it. `warps` is shared memory and free again after the next __syncthreads.
template <int kBlock, class T, class Op>
AMP_DEVICE T reduced_by_block(T value, T* warps, Op op) {
  constexpr int kWarps = kBlock / 32;
  value = reduced_by_warp(value, op);
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    value = warps[threadIdx.x % kWarps];
#pragma unroll
    for (int offset = kWarps / 2; offset > 0; offset /= 2) {
      value = op(value, __shfl_down_sync(kWarp, value, offset));
    }
  }
  return value;
}

// Where the accumulators of a block change hands.
AMP_DEVICE float* accumulators() {
  alignas(16) __shared__ float all[kAccumulators];
  return all;
}

// The eight float accumulators of a thread, and the largest magnitude that it saw. In whatever map elements come, they
// meet their accumulator in the order of a leaf: a map gives all that are 2,048 apart to one thread.
struct Leaf {
  Floats accumulator = {};
  uint32_t largest = 0;  // 16-bit types: of words' low halves in the low half, of their high halves in the high half

  // Elements that are missing are given as 0, which changes nothing.
  template <class Map>
  AMP_DEVICE void add(Raw const& raw, Floats const& x, Type type) {
    add_squares(x);
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < kShare; ++k) {
        largest = Larger()(largest, raw.word[k] & 0x7fffffffu);
      }
    } else {
#pragma unroll
      for (int k = 0; k < (Map::kWhole ? kShare / 2 : kShare); ++k) {
        largest = __vmaxu2(largest, raw.word[k] & 0x7fff7fffu);
      }
    }
  }
  AMP_DEVICE void add(Floats const& x) {
    add_squares(x);
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      largest = Larger()(largest, bits_of(x.at[k]) & 0x7fffffffu);
    }
  }

  // Each accumulator goes to the thread that holds it in another map. All threads call it.
  template <class From, class To>
  AMP_DEVICE void hand_over() {
    float* const all = accumulators();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      all[From::position(k)] = accumulator.at[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      accumulator.at[k] = all[To::position(k)];
    }
  }

  // What the block's chunk contributes, for thread 0, from accumulators as in Singles. All threads call it.
  AMP_DEVICE Partial sum(Type type) {
    __shared__ double sums[kThreads / 32];
    __shared__ uint32_t magnitudes[kThreads / 32];
    hand_over<Singles, Octets>();
    uint32_t magnitude = largest;
    if (type != Type::float32) {
      magnitude = Larger()(magnitude & 0xffffu, magnitude >> 16);
    }
    double const squares = reduced_by_block<kThreads>(lane_sum(accumulator.at), sums, Add());
    magnitude = reduced_by_block<kThreads>(magnitude, magnitudes, Larger());
    // Magnitudes of a type are ordered as the floats that they stand for.
    return {squares, amp_engine::widened(magnitude, type), magnitude >= infinity_bits(type)};
  }

 private:
  AMP_DEVICE void add_squares(Floats const& x) {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      accumulator.at[k] = fma(x.at[k], x.at[k], accumulator.at[k]);
    }
  }
};

// Adds up the leaves of each segment into its first leaf. One thread per chunk; a warp does the segments that begin at
// its chunks one after the other, except those of one leaf, which are done already. `table.leaves(t)` is the number of
// chunks of tensor t, or 0 if it takes no part.
template <class Table>
AMP_DEVICE void sum_segments(Partial* partials, Chunk const* chunks, int64_t n_chunks, int64_t mine, Table const& table) {
  int leaves = 0;
  if (mine < n_chunks) {
    Chunk const chunk = chunks[mine];
    if (chunk.index % kSegment == 0) {
      int64_t const left = table.leaves(chunk.tensor) - int64_t(chunk.index);
      leaves = int(left < kSegment ? left : kSegment);
    }
  }
  int const lane = int(threadIdx.x % 32);
  for (uint32_t todo = __ballot_sync(kWarp, leaves > 1); todo != 0; todo &= todo - 1) {
    int const owner = __ffs(int(todo)) - 1;
    Partial* const first = partials + (mine - lane + owner);
    int const n = __shfl_sync(kWarp, leaves, owner);
    double squares = 0.0;
    uint32_t magnitude = 0;
    for (int i = lane; i < n; i += 32) {
      squares += first[i].sum_squares;
      magnitude = Larger()(magnitude, bits_of(first[i].largest));
    }
    squares = reduced_by_warp(squares, Add());
    magnitude = reduced_by_warp(magnitude, Larger());
    if (lane == 0) {
      *first = {squares, float_of(magnitude), 0};
    }
  }
}

// What sum_segments has left of one tensor.
AMP_DEVICE Partial sum_tensor(Partial const* first, int64_t leaves) {
  double squares = 0.0;
  uint32_t magnitude = 0;
#pragma unroll 4
  for (int64_t i = 0; i < leaves; i += kSegment) {
    squares += first[i].sum_squares;
    magnitude = Larger()(magnitude, bits_of(first[i].largest));
  }
  return {squares, float_of(magnitude), magnitude >= 0x7f800000u};
}

constexpr int kListThreads = 1024;

// list_sum of math/reduction.h by a block of kListThreads; thread 0 gets the result. sum(t) is asked twice, by the
// same thread.
template <class Sum>
AMP_DEVICE double sum_list(int64_t n, Sum const& sum) {
  __shared__ double maxima[kListThreads / 32];
  __shared__ long long counts[kListThreads / 32];
  __shared__ double largest_of_all;
  double largest = 0.0;
  bool has_inf = false;
  bool has_nan = false;
  for (int64_t t = threadIdx.x; t < n; t += kListThreads) {
    double const s = sum(t);
    if (is_finite(s)) {
      largest = Larger()(largest, s);
    } else {
      has_nan |= s != s;
      has_inf |= s == s;
    }
  }
  has_inf = __syncthreads_or(has_inf);
  has_nan = __syncthreads_or(has_nan);
  if (has_inf || has_nan) {
    double const infinity = double(float_of(0x7f800000u));
    return has_nan ? infinity - infinity : infinity;
  }
  largest = reduced_by_block<kListThreads>(largest, maxima, Larger());
  if (threadIdx.x == 0) {
    largest_of_all = largest;
  }
  __syncthreads();
  FixedPoint const fixed(largest_of_all);
  long long units = 0;
  for (int64_t t = threadIdx.x; t < n; t += kListThreads) {
    units += fixed.units(sum(t));
  }
  units = reduced_by_block<kListThreads>(units, counts, Add());
  return fixed.value(units);
}

}  // namespace amp_engine::cuda
