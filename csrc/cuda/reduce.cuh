// The reductions of math/reduction.h for warps and blocks, in the same orders.
#pragma once

#include "cuda/share.cuh"
#include "math/reduction.h"

namespace amp_engine::cuda {

static_assert(kLanes == kThreads && kSlots == kShare);

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

// Lane l combines with lane l + offset, for offsets 16, 8, 4, 2, 1. Lane 0 gets the result.
template <class T, class Op>
AMP_DEVICE T reduced_by_warp(T value, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_down_sync(kWarp, value, offset));
  }
  return value;
}

// Reduces each warp as above. Then warp w combines with warp w + offset, for offsets of half the warps, a quarter, ...,
// 1. Thread 0 gets the result. All threads of the block must call it. `warps` is shared memory, free again after the
// next __syncthreads.
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

// Shared memory in which the threads of a block exchange accumulators.
AMP_DEVICE float* accumulators() {
  alignas(16) __shared__ float all[kAccumulators];
  return all;
}

// The float accumulators of a thread, eight or four, and the largest magnitude that the thread has seen. Each map gives
// elements that are 2,048 apart to one thread, so with any map an accumulator adds its elements in the order of a leaf.
template <int n>
struct LeafOf {
  static constexpr int kBlock = kStride / n;  // threads

  FloatsOf<n> accumulator = {};
  uint32_t largest = 0;  // 16-bit types: maxima of the low and of the high halves of words, in the same halves

  // Missing elements must be 0, which changes nothing.
  template <class Map>
  AMP_DEVICE void add(RawOf<n> const& raw, FloatsOf<n> const& x, Type type) {
    add_squares(x);
    if (type == Type::float32) {
#pragma unroll
      for (int k = 0; k < n; ++k) {
        largest = Larger()(largest, raw.word[k] & 0x7fffffffu);
      }
    } else {
#pragma unroll
      for (int k = 0; k < (Map::kWhole ? n / 2 : n); ++k) {
        largest = __vmaxu2(largest, raw.word[k] & 0x7fff7fffu);
      }
    }
  }
  AMP_DEVICE void add_squares(FloatsOf<n> const& x) {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      accumulator.at[k] = fma(x.at[k], x.at[k], accumulator.at[k]);
    }
  }

  // Passes each accumulator to the thread that has it in map `To`. All threads must call this.
  template <class From, class To>
  AMP_DEVICE void hand_over() {
    float const* const all = shown<From>();
#pragma unroll
    for (int k = 0; k < n; ++k) {
      accumulator.at[k] = all[To::position(k)];
    }
  }

  // Returns the sums of the block's chunk to thread 0. Accumulators must be in map Singles. All threads must call this.
  AMP_DEVICE Partial sum(Type type) {
    __shared__ double sums[kBlock / 32];
    __shared__ uint32_t magnitudes[kBlock / 32];
    float const* const all = shown<SinglesOf<n>>();
    // Threads behind the lanes add 0, which changes no sum of squares.
    double lane = 0.0;
    if (kBlock == kLanes || threadIdx.x < kLanes) {
      Floats slots;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        slots.at[k] = all[int(threadIdx.x) * kSlots + k];
      }
      lane = lane_sum(slots.at);
    }
    uint32_t magnitude = largest;
    if (type != Type::float32) {
      magnitude = Larger()(magnitude & 0xffffu, magnitude >> 16);
    }
    double const squares = reduced_by_block<kBlock>(lane, sums, Add());
    magnitude = reduced_by_block<kBlock>(magnitude, magnitudes, Larger());
    // Bits of magnitudes of one type are ordered like their values.
    return {squares, amp_engine::widened(magnitude, type), magnitude >= infinity_bits(type)};
  }

 private:
  // Shows its accumulators, which are in map `From`, to all threads, in the order of a leaf.
  template <class From>
  AMP_DEVICE float const* shown() {
    float* const all = accumulators();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < n; ++k) {
      all[From::position(k)] = accumulator.at[k];
    }
    __syncthreads();
    return all;
  }
};

using Leaf = LeafOf<kShare>;

// Adds the leaves of each segment into its first leaf. Each thread has one chunk. A warp sums the segments that begin
// at its chunks one after the other. It skips segments of one leaf, which need no sum. `leaves_of(t)` is the number of
// chunks of tensor t, or 0 if the tensor is skipped.
template <class LeavesOf>
AMP_DEVICE void sum_segments(Partial* partials, Chunk const* chunks, int64_t n_chunks, int64_t mine,
                             LeavesOf const& leaves_of) {
  int leaves = 0;
  if (mine < n_chunks) {
    Chunk const chunk = chunks[mine];
    if (chunk.index % kSegment == 0) {
      int64_t const left = leaves_of(chunk.tensor) - int64_t(chunk.index);
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

// Adds the segments of one tensor after sum_segments.
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

// list_sum of math/reduction.h by a block of kListThreads threads. Thread 0 gets the result. Calls sum(t) twice, on the
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
