// Argument checks. Each message names the operation, the list, the index, the given value and the allowed values. The
// checks raise ValueError before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ahead.h"
#include "math/types.h"

namespace amp_engine {

// A list of tensors with the names that messages use for it.
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

inline Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Type::float32;
    case at::kHalf:
      return Type::float16;
    case at::kShort:
      return Type::remainder;
    case at::kByte:
      return Type::byte;
    default:
      return Type::bfloat16;
  }
}

inline Type type_of(at::Tensor const& t) { return type_of(t.scalar_type()); }

// True if the values of `t` are not those in its memory: a negative or conjugate view, or zeros without memory.
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

// The element types that a list may have.
enum class Allowed { floats, floats_or_remainders, float32, moments };

inline bool is_allowed(Allowed allowed, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return true;
    case at::kBFloat16:
      return allowed != Allowed::float32;
    case at::kHalf:
      return allowed == Allowed::floats || allowed == Allowed::floats_or_remainders;
    case at::kShort:
      return allowed == Allowed::floats_or_remainders;
    case at::kByte:
      return allowed == Allowed::floats_or_remainders || allowed == Allowed::moments;
    default:
      return false;
  }
}

// Requires a dense tensor of an allowed type on `device`.
inline void check_tensor(Named const& list, size_t i, at::Device device, Allowed allowed) {
  at::Tensor const& t = *list.tensors[i];
  TORCH_CHECK_VALUE(is_allowed(allowed, t.scalar_type()), list.at(i), " is ", text(t), ", but the type must be ",
                    allowed == Allowed::float32                ? "float32."
                    : allowed == Allowed::moments              ? "float32, bfloat16, or uint8 for codes by blocks."
                    : allowed == Allowed::floats_or_remainders ? "float32, float16, bfloat16, or int16 or uint8 for "
                                                                 "remainders."
                                                               : "float32, float16 or bfloat16.");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, list.at(i), " is a ", t.layout(),
                    " tensor, but only dense (strided) ones are allowed.");
  TORCH_CHECK_VALUE(t.device() == device, list.at(i), " is ", text(t), ", but the first tensor of the call is on ",
                    device, ".");
  TORCH_CHECK_VALUE(t.is_non_overlapping_and_dense(), list.at(i), " is ", text(t),
                    ", which has gaps or overlaps.  Pass .contiguous() tensors.");
  TORCH_CHECK_VALUE(!is_lazy(t), list.at(i), " is ", text(t), kLazyRefused);
}

inline void check_tensors(Named const& list, at::Device device, Allowed allowed = Allowed::floats) {
  for_each(list.tensors, [&](size_t i, at::Tensor const&) { check_tensor(list, i, device, allowed); });
}

inline bool same_layout(at::IntArrayRef sizes, at::IntArrayRef strides, at::Tensor const& t) {
  if (sizes != t.sizes()) {
    return false;
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] != t.stride(int64_t(d))) {
      return false;
    }
  }
  return true;
}

inline bool same_layout(at::Tensor const& a, at::Tensor const& b) { return same_layout(a.sizes(), a.strides(), b); }

// Requires that two entries of the same index have the same shape and the same order in memory.
inline void check_same_layout(Named const& list, Named const& reference, size_t i) {
  at::Tensor const &t = *list.tensors[i], &other = *reference.tensors[i];
  TORCH_CHECK_VALUE(same_layout(t, other), list.at(i), " is ", text(t), ", but ", reference.name, "[", i, "] is ",
                    text(other), ".  Shapes and strides must be equal.");
}

inline void check_same_layout(Named const& list, Named const& reference) {
  for_each(list.tensors, [&](size_t i, at::Tensor const&) {
    ask_ahead(reference.tensors, i);
    if (reference.tensors[i]) {
      check_same_layout(list, reference, i);
    }
  });
}

// Refuses memory that is written twice, or that is written through one tensor and read through another one. All tensors
// are dense, so each is one range of addresses.
class Memory {
 public:
  // Adds tensors that are written. Materializes copy-on-write memory.
  void written(Named const& list) {
    for_each(list.tensors, [](size_t, at::Tensor const& t) { t.mutable_data_ptr(); });
    add(list, true, [](size_t, at::Tensor const&) { return false; });
  }

  // Adds tensors that are read. Call it after all calls of `written`. A tensor may be written in the place where it is
  // read: as `outputs[i]` of the same index, with the same address and type.
  void read(Named const& list, OptionalTensors const& outputs) {
    add(list, false, [&](size_t i, at::Tensor const& t) {
      auto const& output = outputs[i];
      return output && output->const_data_ptr() == t.const_data_ptr() && output->scalar_type() == t.scalar_type();
    });
  }

  void check() {
    auto const by_address = [](Range const& a, Range const& b) { return a.begin < b.begin; };
    if (!std::is_sorted(ranges_.begin(), ranges_.end(), by_address)) {
      std::sort(ranges_.begin(), ranges_.end(), by_address);
    }
    Range const* furthest[2] = {nullptr, nullptr};  // [0] of the reads, [1] of the writes: the range that ends last
    for (Range const& range : ranges_) {
      for (bool const is_written : {true, false}) {
        Range const* const other = furthest[is_written];
        if ((is_written || range.is_written) && other && other->end > range.begin) {
          refuse(range, *other);
        }
      }
      Range const*& last = furthest[range.is_written];
      if (!last || range.end > last->end) {
        last = &range;
      }
    }
  }

 private:
  struct Range {
    char const *begin, *end;
    uint32_t list, index;
    bool is_written;
  };

  template <class Skips>
  void add(Named const& list, bool is_written, Skips const& skips) {
    lists_.push_back({list.op, list.name});
    ranges_.reserve(ranges_.size() + list.tensors.size());
    for_each(list.tensors, [&](size_t i, at::Tensor const& t) {
      if (t.numel() > 0 && !skips(i, t)) {
        auto const* const begin = static_cast<char const*>(t.const_data_ptr());
        ranges_.push_back({begin, begin + t.nbytes(), uint32_t(lists_.size() - 1), uint32_t(i), is_written});
      }
    });
  }

  [[noreturn]] void refuse(Range a, Range b) const {
    if (std::tie(a.list, a.index) < std::tie(b.list, b.index)) {
      std::swap(a, b);
    }
    auto const at = [&](Range const& range) {
      return std::string(lists_[range.list].second) + "[" + std::to_string(range.index) + "]";
    };
    char const* const how = a.begin == b.begin && a.end == b.end ? " has the same memory as " : " shares memory with ";
    C10_THROW_ERROR(ValueError, lists_[a.list].first + (": " + at(a)) + how + at(b) +
                                    ".  Each tensor that is written may be there once, and overlaps no other one.");
  }

  std::vector<std::pair<char const*, char const*>> lists_;  // operation and name
  std::vector<Range> ranges_;
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
