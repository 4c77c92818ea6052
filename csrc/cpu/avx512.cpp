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

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
