// Basics of the arithmetic in this folder, for the host and the device.
//
// Every function is a template over its lane type V. V is `float` on the GPU, for tails, and on machines without vector
// instructions; elsewhere V is a vector of floats (cpu/lanes_*.h). V has + - * /, `fma` and `sqrt`, each rounded once
// (IEEE), and V(float) broadcasts. Compile with -ffp-contract=off (nvcc: -fmad=false): every fused multiply-add is
// written out, so that all lanes, compilers and devices give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define AMP_HD __host__ __device__ __forceinline__
#else
#define AMP_HD inline __attribute__((always_inline))
#endif

namespace amp_engine {

AMP_HD float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
AMP_HD float sqrt(float a) { return ::sqrtf(a); }

AMP_HD uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

AMP_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

}  // namespace amp_engine
