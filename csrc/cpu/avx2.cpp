// Chunk kernels for AVX2. The compiler uses AVX2 for everything in this file, so the file must not instantiate
// functions that the linker could use for other files: no standard library here.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/lanes_avx2.h"

#define SET avx2
#include "cpu/chunk_kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
