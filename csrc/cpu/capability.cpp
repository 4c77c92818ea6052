#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "cpu/chunk_kernels.h"

namespace amp_engine::cpu {
namespace {

ChunkKernels const& best() {
#if defined(__x86_64__)
  char const* const asked = std::getenv("AMP_ENGINE_CPU");
  bool const avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool const lesser = asked && (!std::strcmp(asked, "avx2") || !std::strcmp(asked, "portable"));
  if (avx512 && avx2 && !lesser) {
    return avx512::kernels;
  }
  if (avx2 && !(asked && !std::strcmp(asked, "portable"))) {
    return avx2::kernels;
  }
#endif
  return portable::kernels;
}

}  // namespace

ChunkKernels const& chunk_kernels() {
  static ChunkKernels const& chosen = best();
  return chosen;
}

char const* capability() { return chunk_kernels().name; }

bool outgrows_caches(int64_t bytes) {
#ifdef _SC_LEVEL3_CACHE_SIZE
  static int64_t const last = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return last > 0 && bytes > 4 * last;
#else
  return false;
#endif
}

}  // namespace amp_engine::cpu
