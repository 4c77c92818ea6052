// The operations of backend.h on a GPU, queued on a stream. NaN payloads aside, they give the bits of the CPU backend.
//
// Every pointer, also those in rows and groups, is memory of the current device. No operation allocates, copies or
// waits, so all of them can be captured in a CUDA graph. They throw std::runtime_error if a launch fails.
#pragma once

#include <cuda_runtime_api.h>

#include "../backend.h"

namespace amp_engine::cuda {

void check(CheckArgs const& args, cudaStream_t stream);                                      // 2 launches, unchecked 1
void step(StepArgs const& args, cudaStream_t stream);                                        // 2 launches; LAMB 5 or 6
void update_scale(ScaleUpdate const& update, cudaStream_t stream);                           // 1 launch

}  // namespace amp_engine::cuda
