// CUDA behind mirror.h.
#pragma once

#include "cuda/mirror.h"

namespace amp_engine::cuda {

// The slots of a device, made on first use and kept to the end of the process. That device must be current whenever
// they are used. Throws std::runtime_error where CUDA reports an error.
Slots& slots(int device);

}  // namespace amp_engine::cuda
