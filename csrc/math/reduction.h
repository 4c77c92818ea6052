// Sums that are the same to the bit for any thread count, launch shape, backend and list order.
//
// Leaf: one chunk. Element i of a chunk goes to float accumulator i mod 2048, in order of i, as fma(x, x, acc):
// lane j = (i / 8) mod 256, slot k = i mod 8. `lane_sum` adds the eight slots of a lane in float64; `tree_sum` adds the
// 256 lanes. Missing elements would add 0, which is exact.
// Tensor: `tensor_sum` adds the leaves of each segment of 256 leaves, then the segments in order.
// List: integers, whose sum does not depend on their order (`FixedPoint`).
#pragma once

#include "types.h"

namespace amp_engine {

constexpr int kLanes = 256;
constexpr int kSlots = 8;
constexpr int kAccumulators = kLanes * kSlots;
constexpr int kSegment = 256;

// The sums of one chunk.
struct Partial {
  double sum_squares;
  float largest;  // largest magnitude; inf or NaN if `nonfinite`
  uint32_t nonfinite;
};

template <class Accumulators>  // any type whose [k] is a float
AMP_HD double lane_sum(Accumulators const& a) {
  return ((double(a[0]) + double(a[1])) + (double(a[2]) + double(a[3]))) +
         ((double(a[4]) + double(a[5])) + (double(a[6]) + double(a[7])));
}

// Within each warp of 32 lanes, lane l adds lane l + offset, for offsets 16, 8, 4, 2, 1. Then warp w adds warp w +
// offset, for offsets 4, 2, 1. `lane` has room for 256 values and is overwritten. The first `used` are given; the
// others are 0.
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

// Sum of squares over the leaves of one tensor. Lane l of a warp adds leaves l, l + 32, ... of its segment in order,
// then the warp adds its lanes as in `tree_sum`.
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

// Adds non-negative numbers as integers. The largest number sets the unit: the power of two at or below it is 2^40
// units. The error is at most n * 2^-41 of the largest. Up to 2^21 numbers cannot overflow 63 bits.
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

// The sum of the non-negative sum(0), ..., sum(n - 1), the same for every order. Inf or NaN if one is.
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
