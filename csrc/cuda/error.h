// Turns errors of CUDA calls into exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

// AMP_CUDA_CHECK(cudaEventRecord(event, stream));
// AMP_CUDA_CHECK(cudaGetLastError());
#define AMP_CUDA_CHECK(call)                                     \
  do {                                                           \
    cudaError_t const amp_error_ = (call);                       \
    if (amp_error_ != cudaSuccess) {                             \
      ::amp_engine::cuda::fail(amp_error_, __FILE__, __LINE__);  \
    }                                                            \
  } while (false)

namespace amp_engine::cuda {

[[noreturn]] inline void fail(cudaError_t error, char const* file, int line) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

}  // namespace amp_engine::cuda
