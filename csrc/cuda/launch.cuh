// Launches kernels.
#pragma once

#include <limits>
#include <type_traits>

#include "cuda/error.h"

namespace amp_engine::cuda {

// Launches nothing if `blocks` is 0.
template <class... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, cudaStream_t stream,
            std::type_identity_t<Args> const&... args) {
  if (blocks == 0) {
    return;
  }
  if (blocks > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error("more than 2^31 - 1 blocks in one launch");
  }
  kernel<<<unsigned(blocks), unsigned(threads), 0, stream>>>(args...);
  AMP_CUDA_CHECK(cudaGetLastError());
}

}  // namespace amp_engine::cuda
