// csrc/cuda/launch.cuh for the simulator.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

namespace amp_engine::cuda {

template <class... Args>
void launch(void (*kernel)(Args...), int64_t blocks, int threads, cudaStream_t, std::type_identity_t<Args> const&... args) {
  simulator::launches += blocks > 0;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), simulator::order);
  gridDim.x = unsigned(blocks);
  blockDim.x = unsigned(threads);
  for (unsigned block : order) {
    blockIdx.x = block;
    simulator::run_block(unsigned(threads), [&] { kernel(args...); });
  }
}

}  // namespace amp_engine::cuda
