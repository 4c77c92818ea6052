// csrc/cuda/memory.cuh for the simulator: the same functions, with every alignment checked.
#pragma once

#include <cuda_runtime_api.h>

#include "math/types.h"

#define AMP_DEVICE __device__ __forceinline__

namespace amp_engine::cuda {

inline void aligned(void const* p, size_t size) {
  if (reinterpret_cast<uintptr_t>(p) % size) {
    simulator::fail("misaligned access");
  }
}

inline bool is_wide(void const* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline bool is_aligned(void const* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % uint32_t(bytes) == 0; }

inline void load_16(uint32_t* to, void const* from) {
  aligned(from, 16);
  std::memcpy(to, from, 16);
}
inline void store_16(void* to, uint32_t const* from) {
  aligned(to, 16);
  std::memcpy(to, from, 16);
}
inline void load_16_of_32(uint32_t* to, void const* from) { load_16(to, from); }
inline void load_8(uint32_t* to, void const* from) {
  aligned(from, 8);
  std::memcpy(to, from, 8);
}
inline void store_8(void* to, uint32_t const* from) {
  aligned(to, 8);
  std::memcpy(to, from, 8);
}
inline uint32_t load_4(void const* from) {
  aligned(from, 4);
  return *static_cast<uint32_t const*>(from);
}
inline void store_4(void* to, uint32_t bits) {
  aligned(to, 4);
  *static_cast<uint32_t*>(to) = bits;
}
inline uint32_t load_2(void const* from) {
  aligned(from, 2);
  return *static_cast<uint16_t const*>(from);
}
inline void store_2(void* to, uint32_t bits) {
  aligned(to, 2);
  *static_cast<uint16_t*>(to) = uint16_t(bits);
}

inline float widened_f16(uint32_t bits) { return float_from_f16(uint16_t(bits)); }
inline uint32_t packed_f16(float low, float high) { return f16_from_float(low) | uint32_t(f16_from_float(high)) << 16; }
inline uint32_t packed_bf16(float low, float high) {
  return bf16_from_float(low) | uint32_t(bf16_from_float(high)) << 16;
}

}  // namespace amp_engine::cuda
