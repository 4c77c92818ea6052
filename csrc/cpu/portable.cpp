// Chunk kernels for any machine.
#include "cpu/lanes_portable.h"

#define SET portable
#include "cpu/chunk_kernels.inl"

namespace amp_engine::cpu {

ChunkKernels const kPortable = {
    "portable",
    portable::check,
    portable::scale,
    {
#define X(name, type) portable::step<type>,
        AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
            portable::lamb_apply,
    },
    portable::lamb_moments,
};

}  // namespace amp_engine::cpu
