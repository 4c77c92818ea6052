// Chunk kernels for AVX-512. The compiler uses AVX-512 for everything in this file, so the file must not instantiate
// functions that the linker could use for other files: no standard library here.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

// GCC 12 warns about the undefined vectors inside of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "cpu/lanes_avx512.h"

#define SET avx512
#include "cpu/chunk_kernels.inl"

namespace amp_engine::cpu {

ChunkKernels const kAvx512 = {
    "avx512",
    avx512::check,
    avx512::scale,
    {
#define X(name, type) avx512::step<type>,
        AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
            avx512::lamb_apply,
    },
    avx512::lamb_moments,
};

}  // namespace amp_engine::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
