// csrc/cuda/memory.cuh for the simulator: the same functions, with every alignment checked.
#pragma once

#include <cuda_runtime_api.h>

#include "math/types.h"

#define AMP_DEVICE __device__ __forceinline__

namespace simulator {

// One of a thread; size 0 where its predicate was false.
struct LaneAccess {
  uintptr_t address;
  size_t size;
};

// Of each thread, where a test wants them. Threads of a warp execute the same ones, so that the n-th of each is one
// instruction of the warp.
inline std::vector<std::vector<LaneAccess>>* accesses = nullptr;

template <size_t kSize>
void access(void const* p, bool exists = true) {
  uintptr_t const address = reinterpret_cast<uintptr_t>(p);
  if (exists && address % kSize) {
    fail("misaligned access");
  }
  if (accesses) {
    (*accesses)[threadIdx.x].push_back({address, exists ? kSize : 0});
  }
}

}  // namespace simulator

namespace amp_engine::cuda {

inline bool is_aligned(void const* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % unsigned(bytes) == 0; }

inline void load_16(uint32_t* to, void const* from) {
  simulator::access<16>(from);
  std::memcpy(to, from, 16);
}
inline void store_16(void* to, uint32_t const* from) {
  simulator::access<16>(to);
  std::memcpy(to, from, 16);
}
inline void load_8(uint32_t* to, void const* from) {
  simulator::access<8>(from);
  std::memcpy(to, from, 8);
}
inline void store_8(void* to, uint32_t const* from) {
  simulator::access<8>(to);
  std::memcpy(to, from, 8);
}
inline uint32_t load_4(void const* from) { return *static_cast<uint32_t const*>(from); }
inline uint32_t load_4_if(bool exists, void const* from) {
  simulator::access<4>(from, exists);
  return exists ? *static_cast<uint32_t const*>(from) : 0;
}
inline void store_4_if(bool exists, void* to, uint32_t bits) {
  simulator::access<4>(to, exists);
  if (exists) {
    *static_cast<uint32_t*>(to) = bits;
  }
}
inline void store_4(void* to, uint32_t bits) {
  simulator::access<4>(to);
  std::memcpy(to, &bits, 4);
}
inline uint32_t load_1_if(bool exists, void const* from) {
  simulator::access<1>(from, exists);
  return exists ? *static_cast<uint8_t const*>(from) : 0;
}
inline void store_1_if(bool exists, void* to, uint32_t bits) {
  simulator::access<1>(to, exists);
  if (exists) {
    *static_cast<uint8_t*>(to) = uint8_t(bits);
  }
}
inline uint32_t load_2_if(bool exists, void const* from) {
  simulator::access<2>(from, exists);
  return exists ? *static_cast<uint16_t const*>(from) : 0;
}
inline void store_2_if(bool exists, void* to, uint32_t bits) {
  simulator::access<2>(to, exists);
  if (exists) {
    *static_cast<uint16_t*>(to) = uint16_t(bits);
  }
}

inline float widened_f16(uint32_t bits) { return float_from_f16(uint16_t(bits)); }
inline uint32_t packed_f16(float low, float high) { return f16_from_float(low) | uint32_t(f16_from_float(high)) << 16; }
inline uint32_t packed_bf16(float low, float high) {
  return bf16_from_float(low) | uint32_t(bf16_from_float(high)) << 16;
}

}  // namespace amp_engine::cuda
