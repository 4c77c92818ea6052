// The tables of an operation: plain structs that the host fills and either backend reads.
#pragma once

#include "types.h"

namespace amp_engine {

// The unit of work and the leaf of every reduction, on both backends. docs/design/kernels.md gives the reasons.
constexpr int64_t kChunk = 32768;

// One tensor of a step.
struct alignas(16) Row {
  void* weight;        // float32 master, or the parameter itself
  void* state1;        // exp_avg, momentum buffer or sum; null if the optimizer has none
  void* state2;        // exp_avg_sq; null if the optimizer has none
  void* copy;          // low-precision parameter that the weight is rounded into, or its remainder; null if none
  int64_t numel;
  uint32_t group;      // index of its group of hyperparameters
  Type weight_type;
  Type copy_type;
  uint32_t first_chunk;
  uint32_t n_chunks;
  Type state_type : 16;     // float32; for Adam and SGD also bfloat16 and byte, with stochastic rounding
  uint32_t streamed : 8;    // true if a CPU writes the copy past its caches
  uint32_t adopts : 8;      // true if elements of the copy that are not the weight rounded replace those of the weight
};
static_assert(sizeof(Row) == 64);

// One gradient, or one tensor of a list operation. If `data` is null, the operation skips the tensor.
struct Entry {
  void* data;
  Type type;
};

// What usually stays the same of a gradient when its address changes.
struct GradientForm {
  Type type;
  uint32_t scaled;  // true if it is still multiplied by the loss scale
};

// Elements [index * kChunk, min(numel, (index + 1) * kChunk)) of a tensor.
struct Chunk {
  uint32_t tensor;
  uint32_t index;
};

// The scalars of a step. The pointers are memory of the rows' device. Null means 1, and for found_inf no overflow.
struct Control {
  float const* inv_scale;    // of the backward that made the gradients
  float const* found_inf;    // != 0: the step writes nothing
  float const* norm;         // of all unscaled gradients, for clipping
  double max_norm;           // scaled gradients are multiplied by min(1, max_norm / (norm + 1e-6)); inf: no clipping
};

}  // namespace amp_engine
