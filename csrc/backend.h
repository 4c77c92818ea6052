// The operations of a backend. The namespaces cpu and cuda define the same operations, which give the same bits;
// ops.cpp selects one by the device of the tensors. All pointers, also those to tables, point into that device's
// memory. No operation checks its arguments, allocates, or waits. checks.h has the checks; ops.h has the memory and the
// tables.
#pragma once

#include "math/loss_scale.h"
#include "math/optimizers.h"

namespace amp_engine {

// One tensor of a list operation. If `x.data` is null, the operation skips the tensor.
struct ListRow {
  Entry x;    // read and checked
  Entry y;    // read; null: there is no y
  Entry out;  // written; if null, x is only checked. May be x itself or y itself
  int64_t numel;
  uint32_t first_chunk;
  uint32_t n_chunks;
  bool streamed;  // true if a CPU writes `out` past its caches
};

// The part of a ListRow that stays the same when only addresses change. Addresses of gradients may change in each step.
struct ListShape {
  int64_t numel;
  uint32_t first_chunk;
  uint32_t n_chunks;
  Type x, y, out;
  uint32_t unused;  // explicit padding: uploads compare the bytes of a table with the bytes on the GPU
};

// Results of `check` for each x before it is scaled. A tensor that is skipped has zeros.
struct Sums {
  double* sum_squares;  // [n]
  float* largest;       // [n], largest magnitude
  bool* nonfinite;      // [n]
};

struct CheckArgs {
  ListShape const* shapes;  // [n_tensors], like x, y and out
  void* const* x;
  void* const* y;        // null: there is no y; otherwise out = fma(a, x, b * y)
  void* const* out;      // null: nothing is written
  bool streamed;         // see ListRow
  Chunk const* chunks;
  int64_t n_tensors;
  int64_t n_chunks;
  float const* a;        // out = x * a; null: 1
  bool reciprocal;       // out = x * (1 / a) instead of x * a, with 1 / a rounded once from float64
  float const* clip_norm;  // out = x * min(1, max_norm / (clip_norm + 1e-6)) instead, only where nothing is checked;
  double max_norm;         // null clip_norm: not clipped
  float const* b;        // null: 1
  bool checked;          // false: nothing is checked, and all members below are ignored
  Partial* partials;     // [n_chunks], scratch
  Sums sums;
  float* norm;           // [], 2-norm over all tensors, divided by *norm_scale; null: not computed
  float const* norm_scale;  // null: 1
  float* found_inf;      // [], set to 1 if a tensor is not finite, else unchanged; null: not written
  ScaleUpdate update;    // applied last; not applied if its scale is null
};

AMP_HD ListRow row_of(CheckArgs const& args, int64_t t) {
  ListShape const& shape = args.shapes[t];
  return {{args.x[t], shape.x},
          {args.y ? args.y[t] : nullptr, shape.y},
          {args.out ? args.out[t] : nullptr, shape.out},
          shape.numel,
          shape.first_chunk,
          shape.n_chunks,
          args.streamed};
}

// If `kClips` is false, clip_norm must be null.
template <bool kClips = true>
AMP_HD float factor_a(CheckArgs const& args) {
  if (kClips && args.clip_norm) {
    return float(clip_factor(double(*args.clip_norm), args.max_norm));
  }
  return !args.a ? 1.0f : args.reciprocal ? reciprocal(*args.a) : *args.a;
}

// The `norm` of the results, from the sum of squares over all tensors.
AMP_HD float norm_of(CheckArgs const& args, double sum_squares) {
  return float(::sqrt(sum_squares) * (args.norm_scale ? 1.0 / double(*args.norm_scale) : 1.0));
}

struct StepArgs {
  Formula formula;
  bool narrow;                // true if a row has a remainder or narrow moments: a GPU then runs other kernels
  bool adopts;                // true if a row adopts: so does LAMB's
  Row const* rows;
  void* const* gradients;     // [n_tensors]; null: the tensor is not stepped
  GradientForm const* forms;  // [n_tensors]
  Chunk const* chunks;
  int64_t n_tensors;
  int64_t n_chunks;
  Group const* groups;
  Control control;
  float* steps;               // [n_tensors], incremented for each tensor that is stepped
  float* norms;               // [n_tensors], NovoGrad; null otherwise
  double const* sum_squares;  // [n_tensors], of the gradients before any factor: NovoGrad, LAMB; null otherwise
  float const* largest;       // [n_tensors], of the same gradients; null where sum_squares is null
  float const* gradient_norm; // [], LAMB: norm of all gradients times their factors; null: over this step's tensors
  float* const* lamb_steps;   // [n_tensors], LAMB: numel floats of scratch for each tensor
  void* coefficients;         // [n_tensors * kCoefficientBytes], scratch
  Partial* partials;          // [2 * n_chunks], scratch of LAMB: sums of the weights, then sums of the steps
};
constexpr int64_t kCoefficientBytes = 64;

AMP_HD bool is_skipped(StepArgs const& args) { return args.control.found_inf && *args.control.found_inf != 0.0f; }

AMP_HD Entry gradient_of(StepArgs const& args, int64_t t) { return {args.gradients[t], args.forms[t].type}; }

AMP_HD double factor_of(StepArgs const& args, int64_t t, Group const& group) {
  return gradient_factor(args.control, args.forms[t].scaled, group.maximize);
}

// The part of tensor t in the squared norm of all gradients times their factors.
AMP_HD double scaled_squares(StepArgs const& args, int64_t t) {
  double const factor = args.gradients[t] ? factor_of(args, t, args.groups[args.rows[t].group]) : 0.0;
  return factor == 0.0 ? 0.0 : factor * factor * args.sum_squares[t];
}

AMP_HD char* coefficients_of(StepArgs const& args, int64_t t) {
  return static_cast<char*>(args.coefficients) + t * kCoefficientBytes;
}

// Counts the step of tensor t and writes its coefficients. Only LAMB reads `norm_of_all`, the norm of all gradients
// times their factors.
template <class Update>
AMP_HD void prepare_tensor(StepArgs const& args, int64_t t, Group const& group, double lr, double norm_of_all) {
  static_assert(sizeof(typename Update::Coefficients) <= kCoefficientBytes);
  auto const& hyper = HyperOf<Update>::in(group);
  Prepared prepared{.lr = lr, .factor = factor_of(args, t, group), .step = double(args.steps[t] += 1.0f)};
  if constexpr (Update::kNorm) {
    prepared.gradient_norm = ::fabs(prepared.factor) * Update::norm_of(hyper, args.sum_squares[t], args.largest[t]);
    prepared.norm = args.norms + t;
  }
  if constexpr (std::is_same_v<Update, LambMoments>) {
    prepared.clip = lamb_clip(hyper, norm_of_all);
  }
  *reinterpret_cast<typename Update::Coefficients*>(coefficients_of(args, t)) = Update::prepare(hyper, prepared);
}

namespace cpu {
void check(CheckArgs const& args);
void step(StepArgs const& args);
void update_scale(ScaleUpdate const& update);
char const* capability();  // "avx512", "avx2" or "portable"
// True if a pass over `bytes` bytes evicts nearly all of the first ones from the caches before it reaches the last.
bool outgrows_caches(int64_t bytes);
}  // namespace cpu

}  // namespace amp_engine
