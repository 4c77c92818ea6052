// What the kernels of the steps have in common.
#pragma once

#include "../backend.h"
#include "cuda/share.cuh"

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

// The lists of one chunk of `update`.
struct Lists {
  List gradient, weight, copy, state1, state2;
  bool has_state1, has_copy;

  AMP_DEVICE Lists(Row const& row, Entry const& gradient, uint32_t chunk)
      : gradient(gradient.data, gradient.type, chunk),
        weight(row.weight, row.weight_type, chunk),
        copy(row.copy, row.copy_type, chunk),
        state1(row.state1, Type::float32, chunk),
        state2(row.state2, Type::float32, chunk),
        has_state1(row.state1),
        has_copy(row.copy) {}
};

template <class Map, class Update>
AMP_DEVICE void update_share(Lists const& lists, int first, int n, typename Update::Coefficients const& c) {
  bool const has_state1 = Update::kState1 && lists.has_state1;
  Raw const raw_gradient = Map::load(lists.gradient, lists.gradient.type, first, n);
  Raw const raw_weight = Map::load(lists.weight, lists.weight.type, first, n);
  Raw raw1 = {};
  Raw raw2 = {};
  if (has_state1) {
    raw1 = Map::load(lists.state1, Type::float32, first, n);
  }
  if constexpr (Update::kState2) {
    raw2 = Map::load(lists.state2, Type::float32, first, n);
  }
  Floats const g = Map::widened(raw_gradient, lists.gradient.type);
  Floats w = Map::widened(raw_weight, lists.weight.type);
  Floats s1 = Map::widened(raw1, Type::float32);
  Floats s2 = Map::widened(raw2, Type::float32);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    Update::update(g.at[k], w.at[k], s1.at[k], s2.at[k], c);
  }
  if (has_state1) {
    Map::store(lists.state1, Type::float32, first, n, s1);
  }
  if constexpr (Update::kState2) {
    Map::store(lists.state2, Type::float32, first, n, s2);
  }
  Map::store(lists.weight, lists.weight.type, first, n, w);
  if (lists.has_copy) {
    Map::store(lists.copy, lists.copy.type, first, n, w);
  }
}

template <class Update>
AMP_DEVICE void update_chunk(StepArgs const& args, Chunk chunk, Entry const& gradient) {
  Row const row = args.rows[chunk.tensor];
  auto const c = *reinterpret_cast<typename Update::Coefficients const*>(coefficients_of(args, chunk.tensor));
  int const n = elements_of(chunk.index, row.numel);
  Lists const lists(row, gradient, chunk.index);
  // Lists that the optimizer or the tensor does not have begin at null, which is aligned to everything.
  bool const quads = lists.gradient.has_quads() && lists.weight.has_quads() && lists.copy.has_quads() &&
                     (!Update::kState1 || lists.state1.has_quads()) && (!Update::kState2 || lists.state2.has_quads());
  int first = 0;
  if (quads) {
#pragma unroll 1
    for (; first + kStride <= n; first += kStride) {
      update_share<Quads, Update>(lists, first, n, c);
    }
  }
#pragma unroll 1
  for (; first < n; first += kStride) {
    update_share<Singles, Update>(lists, first, n, c);
  }
}

void lamb(StepArgs const& args, cudaStream_t stream);

}  // namespace amp_engine::cuda
