// Lists of tensors, read ahead of themselves. What a tensor is lies elsewhere than the list, on several cache lines
// that a backward or a step has put out of the caches, and in a loop each is waited for by itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <optional>
#include <vector>

namespace amp_engine {

// Tensors where they are: passing them on touches nothing of theirs.
using Tensors = std::vector<at::Tensor const*>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

inline at::Tensor const* at_place(Tensors const& tensors, size_t i) { return tensors[i]; }

inline at::Tensor const* at_place(OptionalTensors const& tensors, size_t i) {
  return tensors[i] ? &*tensors[i] : nullptr;
}

inline void ask_for_tensor(at::Tensor const& t) {
  char const* const impl = reinterpret_cast<char const*>(t.unsafeGetTensorImpl());
  for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) {
    __builtin_prefetch(impl + line);
  }
}

// What a tensor points to. Looks at the tensor.
inline void ask_for_parts(at::Tensor const& t) {
  c10::TensorImpl const& impl = *t.unsafeGetTensorImpl();
  void const* counter;  // what a VariableVersion consists of, and does not give
  static_assert(sizeof(c10::VariableVersion) == sizeof counter);
  std::memcpy(&counter, &impl.version_counter(), sizeof counter);
  __builtin_prefetch(counter);
  __builtin_prefetch(impl.autograd_meta());
  if (impl.has_storage()) {
    __builtin_prefetch(impl.unsafe_storage().unsafeGetStorageImpl());
  }
}

// tensor.grad() asks first whether it is a leaf, to warn.
inline at::Tensor const& grad_of(at::Tensor const& t) { return t.unsafeGetTensorImpl()->grad(); }

// To be called with i = 0, 1, 2... by a loop that is going to look at each tensor.
template <class List>
void ask_ahead(List const& tensors, size_t i) {
  constexpr size_t kAhead = 8;
  size_t const n = tensors.size();
  if (i + 3 * kAhead < n) {
    __builtin_prefetch(at_place(tensors, i + 3 * kAhead));
  }
  if (i + 2 * kAhead < n) {
    if (at::Tensor const* const t = at_place(tensors, i + 2 * kAhead)) {
      ask_for_tensor(*t);
    }
  }
  if (i + kAhead < n) {
    if (at::Tensor const* const t = at_place(tensors, i + kAhead)) {
      ask_for_parts(*t);
    }
  }
}

// Like `ask_ahead`, by a loop that is going to look at addresses and sizes alone.
inline void ask_ahead_for_memory(OptionalTensors const& tensors, size_t i) {
  constexpr size_t kAhead = 4;
  if (i + 2 * kAhead < tensors.size() && tensors[i + 2 * kAhead]) {
    ask_for_tensor(*tensors[i + 2 * kAhead]);
  }
  if (i + kAhead < tensors.size() && tensors[i + kAhead] && tensors[i + kAhead]->has_storage()) {
    __builtin_prefetch(tensors[i + kAhead]->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
}

// visit(i, tensor) for each tensor of a list, in order.
template <class List, class Visit>
void for_each(List const& tensors, Visit const& visit) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    if (at::Tensor const* const t = at_place(tensors, i)) {
      visit(i, *t);
    }
  }
}

// Like `ask_ahead`, by a loop that is going to look at the gradient of each tensor as well.
inline void ask_ahead_for_gradients(Tensors const& tensors, size_t i) {
  constexpr size_t kAhead = 3;
  ask_ahead(tensors, i);
  if (i + 2 * kAhead < tensors.size()) {
    if (at::Tensor const& grad = grad_of(*tensors[i + 2 * kAhead]); grad.defined()) {
      ask_for_tensor(grad);
    }
  }
  if (i + kAhead < tensors.size()) {
    if (at::Tensor const& grad = grad_of(*tensors[i + kAhead]); grad.defined()) {
      ask_for_parts(grad);
    }
  }
}

}  // namespace amp_engine
