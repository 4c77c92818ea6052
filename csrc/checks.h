// Checks at the door. Each message names the operation, the list, the index, what was given and what is allowed.
// They raise ValueError, before anything is written.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ahead.h"
#include "math/types.h"

namespace amp_engine {

// A list of tensors together with what messages call it.
struct Named {
  char const* op;
  char const* name;
  OptionalTensors const& tensors;

  std::string at(size_t i) const { return std::string(op) + ": " + name + "[" + std::to_string(i) + "]"; }
};

inline std::string text(at::Tensor const& t) {
  std::ostringstream out;
  out << "a " << toString(t.scalar_type()) << " tensor of shape " << t.sizes() << " and strides " << t.strides()
      << " on " << t.device();
  return out.str();
}

inline Type type_of(at::Tensor const& t) {
  return t.scalar_type() == at::kFloat ? Type::float32
                                       : t.scalar_type() == at::kHalf ? Type::float16 : Type::bfloat16;
}

// Whether the elements are not those in memory: of a negative or conjugate view, or zeros that have no memory.
inline bool is_lazy(at::Tensor const& t) {
  constexpr auto lazy = c10::DispatchKeySet(c10::DispatchKey::Conjugate) |
                        c10::DispatchKeySet(c10::DispatchKey::Negative) |
                        c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return t.unsafeGetTensorImpl()->key_set().has_any(lazy);
}

inline char const* const kLazyRefused =
    ", whose elements are not those in its memory (a negative view, or zeros without memory).  Pass a .clone() of it.";

inline void check_length(Named const& list, size_t n, char const* of) {
  TORCH_CHECK_VALUE(list.tensors.size() == n, list.op, ": ", list.name, " has ", list.tensors.size(),
                    " entries, but ", of, " has ", n, ".  All lists of one call are of one length.");
}

// Dense tensors of the three floating types, all on `device`.
inline void check_tensors(Named const& list, at::Device device, bool low_precision_too = true) {
  for_each(list.tensors, [&](size_t i, at::Tensor const& t) {
    bool const is_float32 = t.scalar_type() == at::kFloat;
    bool const is_low = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
    TORCH_CHECK_VALUE(is_float32 || (low_precision_too && is_low), list.at(i), " is ", text(t), ", but the type must be ",
                      low_precision_too ? "float32, float16 or bfloat16." : "float32.");
    TORCH_CHECK_VALUE(t.layout() == at::kStrided, list.at(i), " is a ", t.layout(),
                      " tensor, but only dense (strided) ones are walked.");
    TORCH_CHECK_VALUE(t.device() == device, list.at(i), " is ", text(t), ", but the first tensor of the call is on ",
                      device, ".");
    TORCH_CHECK_VALUE(t.is_non_overlapping_and_dense(), list.at(i), " is ", text(t),
                      ", which has gaps or overlaps.  Pass .contiguous() tensors.");
    TORCH_CHECK_VALUE(!is_lazy(t), list.at(i), " is ", text(t), kLazyRefused);
  });
}

inline bool same_layout(at::Tensor const& a, at::Tensor const& b) {
  if (a.sizes() != b.sizes()) {
    return false;
  }
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) {
      return false;
    }
  }
  return true;
}

// Entries of the same index have one shape and one order in memory.
inline void check_same_layout(Named const& list, Named const& reference) {
  for_each(list.tensors, [&](size_t i, at::Tensor const& t) {
    ask_ahead(reference.tensors, i);
    if (reference.tensors[i]) {
      TORCH_CHECK_VALUE(same_layout(t, *reference.tensors[i]), list.at(i), " is ", text(t), ", but ", reference.name,
                        "[", i, "] is ", text(*reference.tensors[i]), ".  Shapes and strides must be equal.");
    }
  });
}

// Refuses that one memory is written twice, or written and read as something else.
class Written {
 public:
  void add(Named const& list) {
    for (size_t i = 0; i < list.tensors.size(); ++i) {
      if (list.tensors[i] && list.tensors[i]->numel() > 0) {
        auto const [at, is_new] = by_address_.emplace(list.tensors[i]->const_data_ptr(), list.at(i));
        TORCH_CHECK_VALUE(is_new, list.at(i), " has the same memory as ", at->second,
                          ".  Each tensor that is written may be there once.");
      }
    }
  }

 private:
  std::unordered_map<void const*, std::string> by_address_;
};

inline void check_scalar(char const* op, char const* name, std::optional<at::Tensor> const& t, at::ScalarType type,
                         at::Device device) {
  TORCH_CHECK_VALUE(!t || (t->numel() == 1 && t->scalar_type() == type && t->device() == device), op, ": ", name, " is ",
                    t ? text(*t) : "", ", but must be one ", toString(type), " on ", device, ".");
  TORCH_CHECK_VALUE(!t || !is_lazy(*t), op, ": ", name, " is ", t ? text(*t) : "", kLazyRefused);
}

inline void check_vector(char const* op, char const* name, std::optional<at::Tensor> const& t, int64_t n,
                         at::ScalarType type, at::Device device) {
  TORCH_CHECK_VALUE(!t || (t->dim() == 1 && t->size(0) == n && t->is_contiguous() && t->scalar_type() == type &&
                           t->device() == device),
                    op, ": ", name, " is ", t ? text(*t) : "", ", but must be a contiguous ", toString(type),
                    " tensor of shape [", n, "] on ", device, ".");
  TORCH_CHECK_VALUE(!t || !is_lazy(*t), op, ": ", name, " is ", t ? text(*t) : "", kLazyRefused);
}

}  // namespace amp_engine
