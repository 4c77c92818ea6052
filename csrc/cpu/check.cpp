// Maps the elements of a list of tensors, and sums the inputs.
#include "cpu/chunk_kernels.h"
#include "cpu/parallel.h"

namespace amp_engine::cpu {
namespace {

// All work after the map.
void conclude(CheckArgs const& args) {
  bool nonfinite = false;
  for (int64_t t = 0; t < args.n_tensors; ++t) {
    ListShape const& shape = args.shapes[t];
    int64_t const n = args.x[t] ? shape.n_chunks : 0;
    Partial const* const leaf = args.partials + shape.first_chunk;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t const bits = bits_of(leaf[i].largest);
      largest = bits > largest ? bits : largest;
    }
    args.sums.sum_squares[t] = tensor_sum(leaf, n);
    args.sums.largest[t] = float_of(largest);
    args.sums.nonfinite[t] = largest >= 0x7f800000u;
    nonfinite |= args.sums.nonfinite[t];
  }
  if (args.found_inf && nonfinite) {
    *args.found_inf = 1.0f;
  }
  if (args.norm) {
    *args.norm = norm_of(args, list_sum(args.n_tensors, [&](int64_t t) { return args.sums.sum_squares[t]; }));
  }
  if (args.update.state.scale) {
    amp_engine::update_scale(args.update);
  }
}

}  // namespace

void check(CheckArgs const& args) {
  ChunkKernels const& kernels = chunk_kernels();
  float const a = factor_a(args);
  float const b = args.b ? *args.b : 1.0f;
  for_each_chunk(
      args.chunks, args.n_chunks, [&](int64_t t) { return args.x[t] != nullptr; },
      [&](int64_t t, int64_t chunk) {
        __builtin_prefetch(args.x[std::min(t + kAhead, args.n_tensors - 1)]);
        ListRow const row = row_of(args, t);
        if (args.checked) {
          args.partials[row.first_chunk + chunk] = kernels.check(row, chunk, a, b);
        } else {
          kernels.scale(row, chunk, a, b);
        }
      });
  if (args.checked) {
    conclude(args);
  }
}

void update_scale(ScaleUpdate const& update) { amp_engine::update_scale(update); }

}  // namespace amp_engine::cpu
