// Sums that come out the same to the bit for any thread count, launch shape, backend and list order.
//
// Leaf: one chunk. Element i of a chunk goes to float accumulator i mod 2048, in order of i, as fma(x, x, acc):
// lane j = (i / 8) mod 256, slot k = i mod 8. The eight slots of a lane are added in float64 as written in
// `lane_sum`, then the 256 lanes as in `kLaneOffsets`. Missing elements would add 0, which is exact.
// Tensor: segments of 256 leaves, each by `segment_sum`'s order; segments in order.
// List: integers, whose sum has no order (`FixedPoint`).
#pragma once

#include "types.h"

namespace amp_engine {

constexpr int kLanes = 256;
constexpr int kSlots = 8;
constexpr int kAccumulators = kLanes * kSlots;
constexpr int kSegment = 256;

// What one chunk contributes.
struct Partial {
  double sum_squares;
  float largest;  // largest magnitude; inf or NaN if `nonfinite`
  uint32_t nonfinite;
};

template <class Accumulators>  // anything that gives a float for [k]
AMP_HD double lane_sum(Accumulators const& a) {
  return ((double(a[0]) + double(a[1])) + (double(a[2]) + double(a[3]))) +
         ((double(a[4]) + double(a[5])) + (double(a[6]) + double(a[7])));
}

// Within each warp of 32 lanes, lane l takes lane l + offset for 16, 8, 4, 2, 1; then warp w takes warp w + 4, 2, 1.
// Overwrites `lane`, of 256 values of which the first `used` are given and the others 0.
inline double tree_sum(double* lane, int used = kLanes) {
  int const warps = used > 0 ? (used + 31) / 32 : 1;
  for (int j = used; j < 32 * warps; ++j) {
    lane[j] = 0.0;
  }
  for (int warp = 0; warp < warps; ++warp) {
    for (int offset = 16; offset > 0; offset /= 2) {
      for (int l = 0; l < offset; ++l) {
        lane[32 * warp + l] += lane[32 * warp + l + offset];
      }
    }
  }
  for (int offset = 4; offset > 0; offset /= 2) {
    for (int warp = 0; warp < offset && warp + offset < warps; ++warp) {
      lane[32 * warp] += lane[32 * (warp + offset)];
    }
  }
  return lane[0];
}

// Sum of squares over the leaves of one tensor. Lane l of a warp takes leaves l, l + 32, ... of its segment in order,
// then the warp adds up as above.
inline double tensor_sum(Partial const* leaf, int64_t n_leaves) {
  double total = 0.0;
  for (int64_t first = 0; first < n_leaves; first += kSegment) {
    int64_t const last = first + kSegment < n_leaves ? first + kSegment : n_leaves;
    double lane[32] = {};
    for (int64_t i = first; i < last; ++i) {
      lane[(i - first) % 32] += leaf[i].sum_squares;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      for (int l = 0; l < offset; ++l) {
        lane[l] += lane[l + offset];
      }
    }
    total += lane[0];
  }
  return total;
}

// Adds non-negative numbers as integers of a unit that the largest of them sets: 2^40 units to its power of two.
// Error at most n * 2^-41 of the largest; n up to 2^21 tensors cannot overflow 63 bits.
struct FixedPoint {
  int exponent;

  AMP_HD explicit FixedPoint(double largest) : exponent(0) {
    if (largest > 0.0) {
      ::frexp(largest, &exponent);  // largest = f * 2^exponent with f in [0.5, 1)
    }
  }
  AMP_HD int64_t units(double x) const { return int64_t(::llrint(::ldexp(x, 41 - exponent))); }
  AMP_HD double value(int64_t units) const { return ::ldexp(double(units), exponent - 41); }
};

AMP_HD bool is_finite(double x) { return x - x == 0.0; }

// Sum of sum(0), ..., sum(n - 1), which are not negative, the same for every order. Inf or NaN if one of them is.
template <class Sum>
double list_sum(int64_t n, Sum const& sum) {
  double largest = 0.0;
  double nonfinite = 0.0;
  for (int64_t t = 0; t < n; ++t) {
    double const s = sum(t);
    if (!is_finite(s)) {
      nonfinite += s;
    } else if (s > largest) {
      largest = s;
    }
  }
  if (nonfinite != 0.0) {
    return nonfinite;
  }
  FixedPoint const fixed(largest);
  int64_t units = 0;
  for (int64_t t = 0; t < n; ++t) {
    units += fixed.units(sum(t));
  }
  return fixed.value(units);
}

}  // namespace amp_engine
