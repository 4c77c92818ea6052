// Implements the Device of mirror.h with CUDA.
#pragma once

#include "cuda/mirror.h"

namespace amp_engine::cuda {

// The slots of a device, created on first use and kept until the process ends. That device must be current whenever
// they are used. Throws std::runtime_error if CUDA reports an error.
Slots& slots(int device);

}  // namespace amp_engine::cuda
