// What a backend computes. The two namespaces hold the same functions and give the same bits; ops.cpp picks one by
// the device of the tensors. All pointers point into that device's memory, tables included. Nothing here checks
// its arguments, allocates, or waits; checks are in checks.h, memory and tables in ops.h.
#pragma once

#include "math/loss_scale.h"
#include "math/optimizers.h"

namespace amp_engine {

// One tensor of a plain list operation. `x.data` null: the tensor takes no part.
struct ListRow {
  Entry x;    // read and checked
  Entry y;    // axpby: read; null otherwise
  Entry out;  // written; null: x is checked only. May be x itself or y itself
  int64_t numel;
  uint32_t first_chunk;
  uint32_t n_chunks;
};

// What stays of it when only addresses change, as those of gradients may in every step.
struct ListShape {
  int64_t numel;
  uint32_t first_chunk;
  uint32_t n_chunks;
  Type x, y, out;
  uint32_t unused;  // compared with what a GPU has, too
};

// Results of `check` and `axpby` about x, as given. Per tensor, 0 where it takes no part.
struct Sums {
  double* sum_squares;  // [n]
  float* largest;       // [n], largest magnitude
  bool* nonfinite;      // [n]
};

struct CheckArgs {
  ListShape const* shapes;  // [n_tensors], as the next three
  void* const* x;
  void* const* y;        // null: none
  void* const* out;      // likewise
  Chunk const* chunks;
  int64_t n_tensors;
  int64_t n_chunks;
  float const* a;        // out = x * a; null: 1
  bool reciprocal;       // out = x * (1 / a) instead, with 1 / a rounded once from float64
  float const* clip_norm;  // out = x * min(1, max_norm / (clip_norm + 1e-6)) instead, where nothing is checked;
  double max_norm;         // null: not wanted
  float const* b;        // axpby: out = fma(a, x, b * y)
  Partial* partials;     // [n_chunks], scratch; null: nothing is checked, all of the following are ignored
  Sums sums;
  double* total;         // [], sum of squares over all tensors; null: not wanted
  float* norm;           // [], its square root, times 1 / *norm_scale if that is not null; null: not wanted
  float const* norm_scale;
  float* found_inf;      // [], set to 1 if a tensor is not finite, else left alone; null: not wanted
  ScaleUpdate update;    // done last; its scale null: not wanted
};

AMP_HD ListRow row_of(CheckArgs const& args, int64_t t) {
  ListShape const& shape = args.shapes[t];
  return {{args.x[t], shape.x, 0},
          {args.y ? args.y[t] : nullptr, shape.y, 0},
          {args.out ? args.out[t] : nullptr, shape.out, 0},
          shape.numel,
          shape.first_chunk,
          shape.n_chunks};
}

// `kClips` false: there is no clip_norm.
template <bool kClips = true>
AMP_HD float factor_a(CheckArgs const& args) {
  if (kClips && args.clip_norm) {
    return float(clip_factor(double(*args.clip_norm), args.max_norm));
  }
  return !args.a ? 1.0f : args.reciprocal ? reciprocal(*args.a) : *args.a;
}

struct StepArgs {
  Formula formula;
  bool narrow;                // whether a row has a remainder or moments in bfloat16; a GPU has kernels of its own for it
  Row const* rows;
  void* const* gradients;     // [n_tensors]; null: the tensor takes no part
  GradientForm const* forms;  // [n_tensors]
  Chunk const* chunks;
  int64_t n_tensors;
  int64_t n_chunks;
  Group const* groups;
  Control control;
  float* steps;               // [n_tensors], advanced by 1 where stepped
  float* norms;               // [n_tensors], NovoGrad; null otherwise
  double const* sum_squares;  // [n_tensors], of the gradients as given: NovoGrad, LAMB; null otherwise
  float const* largest;       // [n_tensors], likewise
  float const* gradient_norm; // [], LAMB: of all gradients times their factors; null: over the tensors of this step
  float* const* lamb_steps;   // [n_tensors], LAMB: numel floats of scratch each
  void* coefficients;         // [n_tensors * kCoefficientBytes], scratch
  Partial* partials;          // [2 * n_chunks], scratch of LAMB: of weights, then of steps
};
constexpr int64_t kCoefficientBytes = 64;

AMP_HD Entry gradient_of(StepArgs const& args, int64_t t) {
  return {args.gradients[t], args.forms[t].type, args.forms[t].scaled};
}

namespace cpu {
void check(CheckArgs const& args);
void axpby(CheckArgs const& args);
void step(StepArgs const& args);
void update_scale(ScaleUpdate const& update);
char const* capability();  // "avx512", "avx2" or "portable"
// Whether hardly any of the first of so many bytes is in the caches when the last is read or written.
bool outgrows_caches(int64_t bytes);
}  // namespace cpu

}  // namespace amp_engine
