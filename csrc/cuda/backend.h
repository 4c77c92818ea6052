// The operations of backend.h on a GPU, in order of a stream. The same bits as the CPU backend, NaN payloads aside.
//
// Every pointer, those inside of rows and groups too, is memory of the current device. Nothing allocates, copies or
// waits, so all of it can be captured in a CUDA graph. Throws std::runtime_error where a launch fails.
#pragma once

#include <cuda_runtime_api.h>

#include "../backend.h"

namespace amp_engine::cuda {

void check(CheckArgs const& args, cudaStream_t stream);                                      // 2 launches, 1 unchecked
void axpby(CheckArgs const& args, cudaStream_t stream);                                      // likewise
void step(StepArgs const& args, cudaStream_t stream);                                        // 2 launches; LAMB 5 or 6
void update_scale(ScaleUpdate const& update, cudaStream_t stream);                           // 1 launch

}  // namespace amp_engine::cuda
