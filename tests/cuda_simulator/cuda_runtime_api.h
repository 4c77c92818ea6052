// A GPU in one thread, for tests of csrc/cuda on machines without one. This folder comes first on the include path, so
// that csrc/cuda/*.cu compiles as plain C++.
//
// The threads of a block are fibers. They switch at barriers and shuffles only, in an order that changes from block to
// block, and blocks run in an order that changes from launch to launch.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "runtime.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

namespace simulator {

inline int launches = 0;

[[noreturn]] inline void fail(char const* what) {
  std::fprintf(stderr, "simulator: %s\n", what);
  std::abort();
}

struct Barrier {
  unsigned size, arrived = 0, generation = 0;
};

// Where it was switched away from: the compiler's own buffer, since swapcontext and AddressSanitizer's longjmp make a
// system call for each of the switches, of which there are millions.
using Place = void* [5];
#define SWITCHES __attribute__((noinline, no_sanitize_address))

// Made once, it runs a thread of one block after another.
struct Fiber {
  Place here;
  std::unique_ptr<char[]> stack;
  bool done;
};

constexpr size_t kStack = 64 * 1024;
inline std::vector<Fiber> fibers(1024);
inline Place scheduler;
inline std::function<void()> const* kernel;
inline std::vector<Barrier> barriers;  // of the warps, then of the block
inline uint64_t progress;
inline unsigned char exchanged[32][32][16];
inline std::mt19937 order(0);

// A function of its own: in the one that calls __builtin_setjmp GCC may take away the place to come back to.
[[noreturn]] SWITCHES inline void jump(Place& place) { __builtin_longjmp(place, 1); }

SWITCHES inline void leave() {
  if (!__builtin_setjmp(fibers[threadIdx.x].here)) {
    jump(scheduler);
  }
}

inline void enter() {
  for (;;) {
    (*kernel)();
    fibers[threadIdx.x].done = true;
    ++progress;
    leave();
  }
}

SWITCHES inline void resume(Fiber& fiber) {
  if (__builtin_setjmp(scheduler)) {
    return;
  }
  if (fiber.stack) {
    jump(fiber.here);
  }
  fiber.stack = std::make_unique<char[]>(kStack);
  ucontext_t start;
  getcontext(&start);
  start.uc_stack = {fiber.stack.get(), 0, kStack};
  start.uc_link = nullptr;
  makecontext(&start, enter, 0);
  setcontext(&start);
}

inline void wait(Barrier& barrier) {
  unsigned const generation = barrier.generation;
  ++progress;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) {
    leave();
  }
}

inline void run_block(unsigned threads, std::function<void()> const& body) {
  kernel = &body;
  barriers.assign(threads / 32, Barrier{32});
  barriers.push_back(Barrier{threads});
  std::vector<unsigned> threads_left(threads);
  std::iota(threads_left.begin(), threads_left.end(), 0u);
  std::shuffle(threads_left.begin(), threads_left.end(), order);
  for (unsigned t : threads_left) {
    fibers[t].done = false;
  }
  while (!threads_left.empty()) {
    uint64_t const before = progress;
    for (unsigned t : threads_left) {
      threadIdx.x = t;
      resume(fibers[t]);
    }
    if (progress == before) {
      fail("threads wait for threads that have left");
    }
    std::erase_if(threads_left, [](unsigned t) { return fibers[t].done; });
  }
}

template <class T>
T from_lane(T value, unsigned source) {
  static_assert(sizeof(T) <= 16);
  unsigned const warp = threadIdx.x / 32;
  unsigned const lane = threadIdx.x % 32;
  std::memcpy(exchanged[warp][lane], &value, sizeof value);
  wait(barriers[warp]);
  if (source < 32) {
    std::memcpy(&value, exchanged[warp][source], sizeof value);
  }
  wait(barriers[warp]);
  return value;
}

}  // namespace simulator

inline void __syncthreads() { simulator::wait(simulator::barriers.back()); }

inline int __syncthreads_or(int value) {
  static int any;
  any = 0;
  __syncthreads();
  any |= value != 0;
  __syncthreads();
  int const result = any;
  __syncthreads();
  return result;
}

template <class T>
T __shfl_down_sync(uint32_t, T value, unsigned offset) {
  return simulator::from_lane(value, threadIdx.x % 32 + offset);
}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return simulator::from_lane(value, threadIdx.x % 32 ^ unsigned(mask));
}

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  return simulator::from_lane(value, unsigned(lane));
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  uint32_t votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    votes |= uint32_t(simulator::from_lane(value, lane)) << lane;
  }
  return votes;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a & 0xffff0000u, b & 0xffff0000u);
}
