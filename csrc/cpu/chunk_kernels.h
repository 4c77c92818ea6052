// The inner loops, for one chunk of one tensor. Compiled once per instruction set, chosen once per process.
#pragma once

#include "backend.h"

namespace amp_engine::cpu {

struct ChunkKernels {
  char const* name;
  // Returns the sums of x. Writes x * a, or fma(a, x, b * y) if there is a y, into out if there is one.
  Partial (*check)(ListRow const& row, int64_t chunk, float a, float b);
  // Like `check`, without the sums.
  void (*scale)(ListRow const& row, int64_t chunk, float a, float b);
  // One per Formula; for LAMB it is the second stage. `coefficients` points to the optimizer's Coefficients.
  void (*step[kFormulas])(Row const& row, Entry const& gradient, int64_t chunk, void const* coefficients);
  // The first stage of LAMB. Also gives the sums of the weight and of the step.
  void (*lamb_moments)(Row const& row, Entry const& gradient, int64_t chunk, float* step, void const* coefficients,
                       Partial* of_weight, Partial* of_step);
};

// Has the compiler read x from memory where it is used: a copy of a number to all lanes is then a load, not one of the
// instructions that are short where vectors have 512 bits.
template <class T>
AMP_HD T const& reread(T const& x) {
  T const* at = &x;
  asm("" : "+r"(at));
  return *at;
}

// The last bytes of a tensor's coefficients: the number of its step after `mixed`, for stochastic rounding.
AMP_HD uint32_t& step_mixed(void* coefficients) {
  return *reinterpret_cast<uint32_t*>(static_cast<char*>(coefficients) + kCoefficientBytes - sizeof(uint32_t));
}
AMP_HD uint32_t step_mixed(void const* coefficients) { return step_mixed(const_cast<void*>(coefficients)); }

namespace portable {
extern ChunkKernels const kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern ChunkKernels const kernels;
}
namespace avx512 {
extern ChunkKernels const kernels;
}
#endif

// The best instruction set of this machine. AMP_ENGINE_CPU=portable or avx2 selects a lesser one.
ChunkKernels const& chunk_kernels();

}  // namespace amp_engine::cpu
