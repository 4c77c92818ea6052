// What an operation works on: plain structs that the host fills and either backend reads.
#pragma once

#include "types.h"

namespace amp_engine {

// A chunk is the unit of work and the leaf of every reduction, on both backends. 32,768 elements: docs/design/kernels.md.
constexpr int64_t kChunk = 32768;

// One tensor of a step, 64 bytes.
struct alignas(16) Row {
  void* weight;        // float32 master, or the parameter itself
  void* state1;        // exp_avg, momentum buffer or sum; null if the optimizer has none
  void* state2;        // exp_avg_sq; null if the optimizer has none
  void* copy;          // low-precision parameter that the weight is rounded into, or its remainder; null if none
  int64_t numel;
  uint32_t group;      // index of its hyperparameters
  Type weight_type;
  Type copy_type;
  uint32_t first_chunk;
  uint32_t n_chunks;
  Type state_type : 16;     // float32; of Adam also bfloat16, rounded by chance
  uint32_t streamed : 16;   // whether a CPU writes the copy past its caches
};
static_assert(sizeof(Row) == 64);

// One gradient, or one tensor of a plain list. `data` null: this tensor takes no part.
struct Entry {
  void* data;
  Type type;
  uint32_t scaled;  // whether the loss scale is still in it
};

// What stays of a gradient when its address changes.
struct GradientForm {
  Type type;
  uint32_t scaled;
};

// Elements [index * kChunk, min(numel, (index + 1) * kChunk)) of a tensor.
struct Chunk {
  uint32_t tensor;
  uint32_t index;
};

// What a step reads besides its rows, in the memory of the rows' device. Null pointers stand for 1 and "clean".
struct Control {
  float const* inv_scale;    // of the backward whose gradients these are
  float const* found_inf;    // != 0: nothing is written
  float const* norm;         // of all unscaled gradients, for clipping
  double max_norm;           // scaled gradients are multiplied by min(1, max_norm / (norm + 1e-6)); inf: not clipped
};

}  // namespace amp_engine
