// The kernels of LAMB: norm over all gradients (unless it is given), coefficients, moments and steps with the sums of
// each chunk, sums of each segment, trust ratios, weights.
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/step.cuh"

namespace amp_engine::cuda {
namespace {

// The norm over all gradients is stored behind the coefficients of the first tensor until `prepare` has read it.
constexpr int64_t kNormOffset = kCoefficientBytes - sizeof(double);
static_assert(sizeof(LambMoments::Coefficients) <= kNormOffset);

AMP_DEVICE double* norm_of_all(StepArgs const& args) {
  return reinterpret_cast<double*>(coefficients_of(args, 0) + kNormOffset);
}

__global__ void __launch_bounds__(kListThreads) gradient_norm(StepArgs const args) {
  if (is_skipped(args)) {
    return;
  }
  double const sum = sum_list(args.n_tensors, [&](int64_t t) { return scaled_squares(args, t); });
  if (threadIdx.x == 0) {
    *norm_of_all(args) = ::sqrt(sum);
  }
}

__global__ void __launch_bounds__(kPrepareThreads) prepare(StepArgs const args) {
  for_tensor_of_thread(args, [&](int64_t t, Group const& group) {
    double const norm = args.gradient_norm ? double(*args.gradient_norm) : *norm_of_all(args);
    prepare_tensor<LambMoments>(args, t, group, learning_rate(group), norm);
  });
}

// Like update_share, but also adds to both sums. kAdopts: weights may adopt their copies. kNarrow: or have remainders.
template <class Map, bool kAdopts, bool kNarrow>
AMP_DEVICE void moments_share(Lists const& lists, List const& step, int first, int n,
                              LambMoments::Coefficients const& c, LeafOf<Map::kShare>& weights,
                              LeafOf<Map::kShare>& steps) {
  using Raw = typename Map::Raw;
  using Floats = typename Map::Floats;
  Raw const raw_gradient = Map::load(lists.gradient, lists.gradient.type, first, n);
  Raw const raw_weight = Map::load(lists.weight, lists.weight.type, first, n);
  Raw const raw1 = Map::load(lists.state1, Type::float32, first, n);
  Raw const raw2 = Map::load(lists.state2, Type::float32, first, n);
  bool const is_split = kNarrow && is_remainder(lists.copy.type);
  Raw const raw_rest = is_split ? remainder_share<Map>(lists.copy, first, n) : Raw{};
  Floats const g = Map::widened(raw_gradient, lists.gradient.type);
  Floats w = is_split ? joined_share<Map>(raw_weight, raw_rest) : Map::widened(raw_weight, lists.weight.type);
  if (kAdopts && lists.adopts) {
    adopt<Map>(lists.copy, first, n, w);
  }
  Floats s1 = Map::widened(raw1, Type::float32);
  Floats s2 = Map::widened(raw2, Type::float32);
  Floats u;
#pragma unroll
  for (int k = 0; k < Map::kShare; ++k) {
    u.at[k] = LambMoments::step(g.at[k], w.at[k], s1.at[k], s2.at[k], c);
    // With eps = 0 the step of a missing element would be 0 / 0.
    u.at[k] = Map::kWhole || first + Map::position(k) < n ? u.at[k] : 0.0f;
  }
  Map::store(lists.state1, Type::float32, first, n, s1);
  Map::store(lists.state2, Type::float32, first, n, s2);
  Map::store(step, Type::float32, first, n, u);
  weights.add_squares(w);
  steps.add_squares(u);
}

template <int kShareOfThread, bool kAdopts, bool kNarrow>
AMP_DEVICE void moments_chunk(StepArgs const& args) {
  Chunk const chunk = args.chunks[blockIdx.x];
  if (is_skipped(args)) {
    return;
  }
  Entry const gradient = gradient_of(args, chunk.tensor);
  if (!gradient.data) {
    return;
  }
  Row const row = args.rows[chunk.tensor];
  auto const c = *reinterpret_cast<LambMoments::Coefficients const*>(coefficients_of(args, chunk.tensor));
  int const n = elements_of(chunk.index, row.numel);
  Lists const lists(row, gradient, chunk.index);
  List const step(args.lamb_steps[chunk.tensor], Type::float32, chunk.index);
  using Quads = QuadsOf<kShareOfThread>;
  using Singles = SinglesOf<kShareOfThread>;
  LeafOf<kShareOfThread> weights, steps;
  int first = 0;
  if (lists.gradient.has_quads() && lists.weight.has_quads() && lists.state1.has_quads() && lists.state2.has_quads() &&
      step.has_quads() && (!kAdopts || lists.copy.has_quads())) {
#pragma unroll 1
    for (; first + kStride <= n; first += kStride) {
      moments_share<Quads, kAdopts, kNarrow>(lists, step, first, n, c, weights, steps);
    }
    weights.template hand_over<Quads, Singles>();
    steps.template hand_over<Quads, Singles>();
  }
#pragma unroll 1
  for (; first < n; first += kStride) {
    moments_share<Singles, kAdopts, kNarrow>(lists, step, first, n, c, weights, steps);
  }
  Partial const of_weight = weights.sum(Type::float32);
  Partial const of_step = steps.sum(Type::float32);
  if (threadIdx.x == 0) {
    args.partials[blockIdx.x] = of_weight;
    args.partials[args.n_chunks + blockIdx.x] = of_step;
  }
}

__global__ void __launch_bounds__(kUpdateThreads, 2) moments(StepArgs const args) {
  moments_chunk<kUpdateShare, false, false>(args);
}

// To adopt takes more than the 64 registers that 1,024 threads have.
__global__ void __launch_bounds__(kThreads, 3) adopting_moments(StepArgs const args) {
  moments_chunk<kShare, true, false>(args);
}

__global__ void __launch_bounds__(kThreads, 2) narrow_moments(StepArgs const args) {
  moments_chunk<kShare, true, true>(args);
}

// The first half of the blocks sums the weights, the second half sums the steps.
__global__ void __launch_bounds__(kThreads) segments(StepArgs const args) {
  if (is_skipped(args)) {
    return;
  }
  unsigned const half = gridDim.x / 2;
  bool const of_steps = blockIdx.x >= half;
  int64_t const mine = int64_t(of_steps ? blockIdx.x - half : blockIdx.x) * kThreads + threadIdx.x;
  sum_segments(args.partials + (of_steps ? args.n_chunks : 0), args.chunks, args.n_chunks, mine,
               [&](int64_t t) { return args.gradients[t] ? int64_t(args.rows[t].n_chunks) : 0; });
}

__global__ void __launch_bounds__(kPrepareThreads) ratios(StepArgs const args) {
  for_tensor_of_thread(args, [&](int64_t t, Group const& group) {
    Partial const* const of_weight = args.partials + args.rows[t].first_chunk;
    int64_t const leaves = args.rows[t].n_chunks;
    double const weight_norm = ::sqrt(sum_tensor(of_weight, leaves).sum_squares);
    double const step_norm = ::sqrt(sum_tensor(of_weight + args.n_chunks, leaves).sum_squares);
    *reinterpret_cast<float*>(coefficients_of(args, t)) =
        lamb_minus_rate(group.lamb, learning_rate(group), weight_norm, step_norm);
  });
}

// The second stage, as an update whose gradient is the step.
struct Apply {
  static constexpr bool kState1 = false;
  static constexpr bool kState2 = false;

  struct Coefficients {
    float minus_rate;
  };

  static AMP_DEVICE void update(float step, float& weight, float&, float&, Coefficients const& c) {
    weight = fma(c.minus_rate, step, weight);
  }
};

// Calls body(chunk, step) if the block has a chunk that is stepped.
template <class Body>
AMP_DEVICE void if_taken(StepArgs const& args, Body const& body) {
  Chunk const chunk = args.chunks[blockIdx.x];
  if (!is_skipped(args) && args.gradients[chunk.tensor]) {
    body(chunk, Entry{args.lamb_steps[chunk.tensor], Type::float32});
  }
}

__global__ void __launch_bounds__(kUpdateThreads, 2) apply(StepArgs const args) {
  if_taken(args, [&](Chunk chunk, Entry const& step) { update_chunk<Apply>(args, chunk, step); });
}

__global__ void __launch_bounds__(kThreads, 3) narrow_apply(StepArgs const args) {
  if_taken(args, [&](Chunk chunk, Entry const& step) { update_narrow_chunk<Apply>(args, chunk, step); });
}

}  // namespace

void lamb(StepArgs const& args, cudaStream_t stream) {
  if (!args.gradient_norm && args.n_tensors > 0) {
    launch(gradient_norm, 1, kListThreads, stream, args);
  }
  launch(prepare, prepare_blocks(args), kPrepareThreads, stream, args);
  if (args.narrow || args.adopts) {
    launch(args.narrow ? narrow_moments : adopting_moments, args.n_chunks, kThreads, stream, args);
  } else {
    launch(moments, args.n_chunks, kUpdateThreads, stream, args);
  }
  launch(segments, 2 * ((args.n_chunks + kThreads - 1) / kThreads), kThreads, stream, args);
  launch(ratios, prepare_blocks(args), kPrepareThreads, stream, args);
  if (args.narrow) {
    launch(narrow_apply, args.n_chunks, kThreads, stream, args);
  } else {
    launch(apply, args.n_chunks, kUpdateThreads, stream, args);
  }
}

}  // namespace amp_engine::cuda
