// What an operation walks: plain structs that the host fills and either backend reads.
#pragma once

#include "types.h"

namespace amp_engine {

// A chunk is the unit of work and the leaf of every reduction, on both backends. 32,768 elements: docs/design/kernels.md.
constexpr int64_t kChunk = 32768;

// One tensor of a step, 64 bytes.
struct alignas(16) Row {
  void* weight;        // float32 master, or the parameter itself
  float* state1;       // exp_avg, momentum buffer or sum; null if the optimizer has none
  float* state2;       // exp_avg_sq; null if the optimizer has none
  void* copy;          // low-precision parameter that the weight is rounded into; null if none
  int64_t numel;
  uint32_t group;      // index of its hyperparameters
  Type weight_type;
  Type copy_type;
  uint32_t first_chunk;
  uint32_t n_chunks;
  uint32_t streamed;   // whether a CPU writes the copy past its caches
};
static_assert(sizeof(Row) == 64);

// One gradient, or one tensor of a plain list. `data` null: this tensor takes no part.
struct Entry {
  void* data;
  Type type;
  uint32_t scaled;  // whether the loss scale is still in it
};
static_assert(sizeof(Entry) == 16);

// Elements [index * kChunk, min(numel, (index + 1) * kChunk)) of a tensor.
struct Chunk {
  uint32_t tensor;
  uint32_t index;
};

// Hyperparameters of one parameter group. `lr_on_device`, where not null, is read instead of `lr`.
struct Group {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, max_grad_norm;
  float const* lr_on_device;
  uint32_t decoupled;             // weight decay acts on the weight (AdamW), not on the gradient (L2)
  uint32_t bias_correction;
  uint32_t maximize;
  uint32_t nesterov;
  uint32_t decay_after_momentum;  // FusedSGD's wd_after_momentum
  uint32_t grad_averaging;        // the gradient enters the first moment times 1 - beta1, else times 1
  uint32_t use_nvlamb;            // trust ratio also where weight decay is 0
  uint32_t decay_inside_moment;   // NovoGrad's reg_inside_moment
  uint32_t infinity_norm;         // NovoGrad's norm_type=inf
  uint32_t init_zero;             // NovoGrad: the first second moment is 0, not the first norm
};

// What a step reads besides its rows, in the memory of the rows' device. Null pointers stand for 1 and "clean".
struct Control {
  float const* inv_scale;    // of the backward whose gradients these are
  float const* found_inf;    // != 0: nothing is written
  float const* norm;         // of all unscaled gradients, for clipping
  double max_norm;           // scaled gradients are multiplied by min(1, max_norm / (norm + 1e-6)); inf: not clipped
};

}  // namespace amp_engine
