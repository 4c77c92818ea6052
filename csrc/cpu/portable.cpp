// Chunk kernels for any machine.
#include "cpu/lanes_portable.h"

#define SET portable
#include "cpu/chunk_kernels.inl"

namespace amp_engine::cpu {

ChunkKernels const kPortable = {
    "portable",
    portable::check,
    portable::scale,
    {portable::step<Adam>, portable::step<Sgd>, portable::step<Adagrad>, portable::step<NovoGrad>, portable::lamb_apply},
    portable::lamb_moments,
};

}  // namespace amp_engine::cpu
