// The steps: first the coefficients of each tensor, then one pass over all elements (LAMB: two passes).
#include <type_traits>

#include "cpu/chunk_kernels.h"
#include "cpu/parallel.h"

namespace amp_engine::cpu {
namespace {

double factor_of(StepArgs const& args, int64_t t) {
  return gradient_factor(args.control, args.forms[t].scaled, args.groups[args.rows[t].group].maximize);
}

double norm_of_all(StepArgs const& args) {
  if (args.gradient_norm) {
    return double(*args.gradient_norm);
  }
  return ::sqrt(list_sum(args.n_tensors, [&](int64_t t) {
    double const factor = args.gradients[t] ? factor_of(args, t) : 0.0;
    return factor == 0.0 ? 0.0 : factor * factor * args.sum_squares[t];
  }));
}

void* coefficients_of(StepArgs const& args, int64_t t) {
  return static_cast<char*>(args.coefficients) + t * kCoefficientBytes;
}

double learning_rate(Group const& group) { return group.lr_on_device ? double(*group.lr_on_device) : group.lr; }

template <class Update>
void prepare(StepArgs const& args) {
  static_assert(sizeof(typename Update::Coefficients) <= kCoefficientBytes - sizeof(uint32_t));
  constexpr bool is_lamb = std::is_same_v<Update, LambMoments>;
  double const norm = is_lamb ? norm_of_all(args) : 0.0;
  for (int64_t t = 0; t < args.n_tensors; ++t) {
    if (!args.gradients[t]) {
      continue;
    }
    Group const& group = args.groups[args.rows[t].group];
    auto const& hyper = HyperOf<Update>::in(group);
    Prepared prepared{learning_rate(group), factor_of(args, t), double(args.steps[t] += 1.0f), 0.0, nullptr, 1.0};
    if constexpr (Update::kNorm) {
      prepared.gradient_norm = ::fabs(prepared.factor) * Update::norm_of(hyper, args.sum_squares[t], args.largest[t]);
      prepared.norm = args.norms + t;
    }
    if constexpr (is_lamb) {
      prepared.clip = lamb_clip(hyper, norm);
    }
    *static_cast<typename Update::Coefficients*>(coefficients_of(args, t)) = Update::prepare(hyper, prepared);
    if constexpr (kNarrowState<Update>) {
      step_mixed(coefficients_of(args, t)) = mixed(uint32_t(int64_t(prepared.step)));
    }
  }
}

template <class GradientOf>
void update(StepArgs const& args, GradientOf const& gradient_of) {
  auto const kernel = chunk_kernels().step[int(args.formula)];
  for_each_chunk(
      args.chunks, args.n_chunks, [&](int64_t t) { return args.gradients[t] != nullptr; },
      [&](int64_t t, int64_t chunk) { kernel(args.rows[t], gradient_of(t), chunk, coefficients_of(args, t)); });
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
    *static_cast<float*>(coefficients_of(args, t)) =
        lamb_minus_rate(group.lamb, learning_rate(group), ::sqrt(tensor_sum(of_weight, row.n_chunks)),
                        ::sqrt(tensor_sum(of_weight + args.n_chunks, row.n_chunks)));
  }
  update(args, [&](int64_t t) { return Entry{args.lamb_steps[t], Type::float32, 0}; });
}

}  // namespace

void step(StepArgs const& args) {
  if (args.control.found_inf && *args.control.found_inf != 0.0f) {
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
