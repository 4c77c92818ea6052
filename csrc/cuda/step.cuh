// What the kernels of the steps have in common.
#pragma once

#include "../backend.h"
#include "cuda/octet.cuh"

namespace amp_engine::cuda {

AMP_DEVICE bool is_skipped(StepArgs const& args) {
  return args.control.found_inf && *args.control.found_inf != 0.0f;
}

AMP_DEVICE double learning_rate(Group const& group) {
  return group.lr_on_device ? double(float_of(load_4(group.lr_on_device))) : group.lr;
}

AMP_DEVICE char* coefficients_of(StepArgs const& args, int64_t t) {
  return static_cast<char*>(args.coefficients) + t * kCoefficientBytes;
}

// One thread per tensor: counts the step and writes the tensor's coefficients. `fill(prepared, t, hyper)` adds what
// the optimizer asks for besides.
template <class Update, class Fill>
AMP_DEVICE void prepare_tensor(StepArgs const& args, Fill const& fill) {
  static_assert(sizeof(typename Update::Coefficients) <= kCoefficientBytes);
  int64_t const t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= args.n_tensors || is_skipped(args)) {
    return;
  }
  Entry const gradient = args.gradients[t];
  if (!gradient.data) {
    return;
  }
  Group const group = args.groups[args.rows[t].group];
  auto const& hyper = HyperOf<Update>::in(group);
  float const step = args.steps[t] + 1.0f;
  args.steps[t] = step;
  double const factor = gradient_factor(args.control, gradient.scaled, group.maximize);
  Prepared prepared{learning_rate(group), factor, double(step), 0.0, nullptr, 1.0};
  fill(prepared, t, hyper);
  *reinterpret_cast<typename Update::Coefficients*>(coefficients_of(args, t)) = Update::prepare(hyper, prepared);
}

// Small blocks: a thousand tensors keep eight multiprocessors busy, not four, with arithmetic in float64.
constexpr int kPrepareThreads = 128;

inline int64_t prepare_blocks(StepArgs const& args) { return (args.n_tensors + kPrepareThreads - 1) / kPrepareThreads; }

// One chunk of `update`: whole strides by quads where every list has them, the rest, or all, element by element.
template <class Update>
AMP_DEVICE void update_chunk(StepArgs const& args, Chunk chunk, Entry const& gradient) {
  Row const row = args.rows[chunk.tensor];
  auto const c = *reinterpret_cast<typename Update::Coefficients const*>(coefficients_of(args, chunk.tensor));
  int const n = elements_of(chunk.index, row.numel);
  List const g(gradient.data, gradient.type, chunk.index);
  List const weight(row.weight, row.weight_type, chunk.index);
  List const copy(row.copy, row.copy_type, chunk.index);
  List const state1(row.state1, Type::float32, chunk.index);
  List const state2(row.state2, Type::float32, chunk.index);
  bool const has_state1 = Update::kState1 && row.state1;
  bool const has_copy = row.copy;
  auto const take = [&]<class Access>(int begin, int end) {
#pragma unroll 1
    for (int i = begin + int(threadIdx.x) * Access::kFirst; i < end; i += kStride) {
      Raw const raw_g = Access::load(g, i, end);
      Raw const raw_weight = Access::load(weight, i, end);
      Raw raw1 = {};
      Raw raw2 = {};
      if (has_state1) {
        raw1 = Access::load(state1, i, end);
      }
      if constexpr (Update::kState2) {
        raw2 = Access::load(state2, i, end);
      }
      Floats const x = widened(raw_g, g.type);
      Floats w = widened(raw_weight, weight.type);
#pragma unroll
      for (int k = 0; k < kOctet; ++k) {
        float s1 = float_of(raw1.word[k]);
        float s2 = float_of(raw2.word[k]);
        Update::update(x.at[k], w.at[k], s1, s2, c);
        raw1.word[k] = bits_of(s1);
        raw2.word[k] = bits_of(s2);
      }
      if (has_state1) {
        Access::store(state1, i, end, raw1);
      }
      if constexpr (Update::kState2) {
        Access::store(state2, i, end, raw2);
      }
      Access::store(weight, i, end, rounded(w, weight.type));
      if (has_copy) {
        Access::store(copy, i, end, rounded(w, copy.type));
      }
    }
  };
  bool const quads = g.has_quads() && weight.has_quads() && (!has_copy || copy.has_quads()) &&
                     (!has_state1 || state1.has_quads()) && (!Update::kState2 || state2.has_quads());
  int const whole = quads ? n / kStride * kStride : 0;
  take.template operator()<Quads>(0, whole);
  take.template operator()<Singles>(whole, n);
}

void lamb(StepArgs const& args, cudaStream_t stream);

}  // namespace amp_engine::cuda
