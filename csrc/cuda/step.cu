// The steps: first the coefficients of each tensor, then one pass over all elements. lamb.cu has LAMB, with two passes.
#include "cuda/step.cuh"

#include "cuda/backend.h"
#include "cuda/launch.cuh"

namespace amp_engine::cuda {
namespace {

template <class Update>
__global__ void __launch_bounds__(kPrepareThreads) prepare(StepArgs const args) {
  for_tensor_of_thread(args, [&](int64_t t, Group const& group) {
    prepare_tensor<Update>(args, t, group, learning_rate(group), 0.0);
  });
}

// Calls body(chunk, gradient) if the block has a chunk that is stepped.
template <class Body>
AMP_DEVICE void if_taken(StepArgs const& args, Body const& body) {
  Chunk const chunk = args.chunks[blockIdx.x];
  if (is_skipped(args)) {
    return;
  }
  Entry const gradient = gradient_of(args, chunk.tensor);
  if (gradient.data) {
    body(chunk, gradient);
  }
}

template <class Update>
__global__ void __launch_bounds__(kUpdateThreads, 2) update(StepArgs const args) {
  if_taken(args, [&](Chunk chunk, Entry const& gradient) { update_chunk<Update>(args, chunk, gradient); });
}

template <class Update>
__global__ void __launch_bounds__(kThreads, 3) narrow(StepArgs const args) {
  if_taken(args, [&](Chunk chunk, Entry const& gradient) { update_narrow_chunk<Update>(args, chunk, gradient); });
}

template <class Update>
void run(StepArgs const& args, cudaStream_t stream) {
  launch(prepare<Update>, prepare_blocks(args), kPrepareThreads, stream, args);
  if (args.narrow) {
    launch(narrow<Update>, args.n_chunks, kThreads, stream, args);
  } else {
    launch(update<Update>, args.n_chunks, kUpdateThreads, stream, args);
  }
}

}  // namespace

void step(StepArgs const& args, cudaStream_t stream) {
  switch (args.formula) {
#define X(name, type) \
  case Formula::name:    \
    return run<type>(args, stream);
    AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
    case Formula::lamb:
      return lamb(args, stream);
  }
}

}  // namespace amp_engine::cuda
