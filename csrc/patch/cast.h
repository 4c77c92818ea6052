// The casts of O1 in C++. amp_engine/casting/wrappers.py is the reference in Python.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_engine::patch {

inline bool is_low(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// float64 and integers are never cast.
inline bool is_castable(at::ScalarType type) { return type == at::kFloat || is_low(type); }

// tensor.to(type), with its autograd edge if one is needed.
at::Tensor cast(at::Tensor const& tensor, at::ScalarType type);

}  // namespace amp_engine::patch
