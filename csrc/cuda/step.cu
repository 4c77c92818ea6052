// The steps: coefficients of each tensor first, then every element once. LAMB, in two stages, is in lamb.cu.
#include "cuda/step.cuh"

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "math/adagrad.h"
#include "math/adam.h"
#include "math/novograd.h"
#include "math/sgd.h"

namespace amp_engine::cuda {
namespace {

template <class Update>
__global__ void __launch_bounds__(kPrepareThreads) prepare(StepArgs const args) {
  prepare_tensor<Update>(args, [&](Prepared& prepared, int64_t t, Group const& group) {
    if (args.kind == Kind::novograd) {
      double const norm = group.infinity_norm ? double(args.largest[t]) : ::sqrt(args.sum_squares[t]);
      prepared.gradient_norm = ::fabs(prepared.factor) * norm;
      prepared.norm = args.norms + t;
    }
  });
}

// 3 blocks: 80 registers. At 4 blocks, 64, Adam spills, and bytes in flight do not need them.
template <class Update>
__global__ void __launch_bounds__(kThreads, 3) update(StepArgs const args) {
  Chunk const chunk = args.chunks[blockIdx.x];
  if (is_skipped(args)) {
    return;
  }
  Entry const gradient = args.gradients[chunk.tensor];
  if (gradient.data) {
    update_chunk<Update>(args, chunk, gradient);
  }
}

template <class Update>
void run(StepArgs const& args, cudaStream_t stream) {
  launch(prepare<Update>, prepare_blocks(args), kPrepareThreads, stream, args);
  launch(update<Update>, args.n_chunks, kThreads, stream, args);
}

}  // namespace

void step(StepArgs const& args, cudaStream_t stream) {
  switch (args.kind) {
    case Kind::adam:
      return run<Adam>(args, stream);
    case Kind::sgd:
      return run<Sgd>(args, stream);
    case Kind::adagrad:
      return run<Adagrad>(args, stream);
    case Kind::novograd:
      return run<NovoGrad>(args, stream);
    case Kind::lamb:
      return lamb(args, stream);
  }
}

}  // namespace amp_engine::cuda
