// The steps: first the coefficients of each tensor, then one pass over all elements (LAMB: two passes).
#include <type_traits>

#include "cpu/chunk_kernels.h"
#include "cpu/parallel.h"

namespace amp_engine::cpu {
namespace {

double norm_of_all(StepArgs const& args) {
  if (args.gradient_norm) {
    return double(*args.gradient_norm);
  }
  return ::sqrt(list_sum(args.n_tensors, [&](int64_t t) { return scaled_squares(args, t); }));
}

template <class Update>
void prepare(StepArgs const& args) {
  static_assert(sizeof(typename Update::Coefficients) <= kCoefficientBytes - sizeof(uint32_t));
  double const norm = std::is_same_v<Update, LambMoments> ? norm_of_all(args) : 0.0;
  for (int64_t t = 0; t < args.n_tensors; ++t) {
    if (!args.gradients[t]) {
      continue;
    }
    Group const& group = args.groups[args.rows[t].group];
    prepare_tensor<Update>(args, t, group, group.lr, norm);
    step_mixed(coefficients_of(args, t)) = mixed(uint32_t(int64_t(args.steps[t])));
  }
}

template <class GradientOf>
void update(StepArgs const& args, GradientOf const& gradient_of) {
  auto const kernel = chunk_kernels().step[int(args.formula)];
  for_each_chunk(
      args.chunks, args.n_chunks, [&](int64_t t) { return args.gradients[t] != nullptr; },
      [&](int64_t t, int64_t chunk) {
        int64_t const ahead = std::min(t + kAhead, args.n_tensors - 1);
        Row const& next = args.rows[ahead];
        for (void const* data : {next.weight, next.state1, next.state2, next.copy, args.gradients[ahead]}) {
          __builtin_prefetch(data);
        }
        kernel(args.rows[t], gradient_of(t), chunk, coefficients_of(args, t));
      });
}

void lamb(StepArgs const& args) {
  prepare<LambMoments>(args);
  auto const moments = chunk_kernels().lamb_moments;
  for_each_chunk(
      args.chunks, args.n_chunks, [&](int64_t t) { return args.gradients[t] != nullptr; },
      [&](int64_t t, int64_t chunk) {
        Row const& row = args.rows[t];
        Partial* const of_weight = args.partials + row.first_chunk + chunk;
        moments(row, gradient_of(args, t), chunk, args.lamb_steps[t], coefficients_of(args, t), of_weight,
                of_weight + args.n_chunks);
      });
  for (int64_t t = 0; t < args.n_tensors; ++t) {
    if (!args.gradients[t]) {
      continue;
    }
    Row const& row = args.rows[t];
    Partial const* const of_weight = args.partials + row.first_chunk;
    Group const& group = args.groups[row.group];
    *reinterpret_cast<float*>(coefficients_of(args, t)) =
        lamb_minus_rate(group.lamb, group.lr, ::sqrt(tensor_sum(of_weight, row.n_chunks)),
                        ::sqrt(tensor_sum(of_weight + args.n_chunks, row.n_chunks)));
  }
  update(args, [&](int64_t t) { return Entry{args.lamb_steps[t], Type::float32}; });
}

}  // namespace

void step(StepArgs const& args) {
  if (is_skipped(args)) {
    return;
  }
  switch (args.formula) {
#define X(name, type)    \
  case Formula::name:       \
    prepare<type>(args); \
    break;
    AMP_ONE_STAGE_OPTIMIZERS(X)
#undef X
    case Formula::lamb:
      return lamb(args);
  }
  update(args, [&](int64_t t) { return gradient_of(args, t); });
}

}  // namespace amp_engine::cpu
