// The inner loops: one chunk of one tensor each. Compiled once per instruction set, chosen once per process.
#pragma once

#include "backend.h"

namespace amp_engine::cpu {

struct ChunkKernels {
  char const* name;
  // What x contributes to the sums; writes x * a, or fma(a, x, b * y) where there is a y, into out if there is one.
  Partial (*check)(ListRow const& row, int64_t chunk, float a, float b);
  // As above without the sums.
  void (*scale)(ListRow const& row, int64_t chunk, float a, float b);
  // One per Formula; LAMB's is its second stage. `coefficients` is the optimizer's Coefficients.
  void (*step[kFormulas])(Row const& row, Entry const& gradient, int64_t chunk, void const* coefficients);
  // LAMB's first stage; gives the sums of the weight and of the step.
  void (*lamb_moments)(Row const& row, Entry const& gradient, int64_t chunk, float* step, void const* coefficients,
                       Partial* of_weight, Partial* of_step);
};

// Behind the coefficients of one tensor: the number of its step, mixed, for moments that are rounded by chance.
AMP_HD uint32_t& step_mixed(void* coefficients) {
  return *reinterpret_cast<uint32_t*>(static_cast<char*>(coefficients) + kCoefficientBytes - sizeof(uint32_t));
}
AMP_HD uint32_t step_mixed(void const* coefficients) { return step_mixed(const_cast<void*>(coefficients)); }

extern ChunkKernels const kPortable;
#if defined(__x86_64__)
extern ChunkKernels const kAvx2;
extern ChunkKernels const kAvx512;
#endif

// The best set that this machine can run. AMP_ENGINE_CPU=portable|avx2|avx512 asks for a lesser one.
ChunkKernels const& chunk_kernels();

}  // namespace amp_engine::cpu
