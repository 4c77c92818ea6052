// Loops over lists of tensors that prefetch the tensors ahead. The data of a tensor lies outside of the list, on
// several cache lines. A backward or a step evicts these lines, so a loop without prefetches waits for each line.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace amp_engine {

// Pointers to tensors, so that passing a list on touches neither the tensors nor their reference counts.
using Tensors = std::vector<at::Tensor const*>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

inline at::Tensor const* at_place(Tensors const& tensors, size_t i) { return tensors[i]; }

inline at::Tensor const* at_place(OptionalTensors const& tensors, size_t i) {
  return tensors[i] ? &*tensors[i] : nullptr;
}

inline constexpr auto ask_for_tensor = [](at::Tensor const& t) {
  char const* const impl = reinterpret_cast<char const*>(t.unsafeGetTensorImpl());
  for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) {
    __builtin_prefetch(impl + line);
  }
};

// Prefetches the pointers to a tensor's gradient and version, where a loop reads no more.
inline constexpr auto ask_for_pointers = [](at::Tensor const& t) {
  char const* const version = reinterpret_cast<char const*>(&t.unsafeGetTensorImpl()->version_counter());
  __builtin_prefetch(version - 2 * sizeof(void*));  // the pointer to the gradient
  __builtin_prefetch(version);
};

// Prefetches the object with a tensor's version. Reads the tensor itself, as the next two do.
inline constexpr auto ask_for_version = [](at::Tensor const& t) {
  void const* counter;  // the only member of a VariableVersion, which is private
  static_assert(sizeof(c10::VariableVersion) == sizeof counter);
  std::memcpy(&counter, &t.unsafeGetTensorImpl()->version_counter(), sizeof counter);
  __builtin_prefetch(counter);
};

// Prefetches the object with a tensor's gradient, which lies behind a name.
inline constexpr auto ask_for_gradient = [](at::Tensor const& t) {
  if (auto const* const meta = reinterpret_cast<char const*>(t.unsafeGetTensorImpl()->autograd_meta())) {
    __builtin_prefetch(meta);
    __builtin_prefetch(meta + sizeof(void*) + sizeof(std::string));
  }
};

// Prefetches the objects with a tensor's version and memory.
inline constexpr auto ask_for_parts = [](at::Tensor const& t) {
  ask_for_version(t);
  if (t.unsafeGetTensorImpl()->has_storage()) {
    __builtin_prefetch(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
};

// tensor.grad() would first check whether the tensor is a leaf, in order to warn.
inline at::Tensor const& grad_of(at::Tensor const& t) { return t.unsafeGetTensorImpl()->grad(); }

// A loop that reads each tensor calls this with i = 0, 1, 2... The other arguments prefetch a tensor, and the objects
// behind it.
template <class List, class Ask = decltype(ask_for_tensor), class More = decltype(ask_for_parts)>
void ask_ahead(List const& tensors, size_t i, Ask const& ask_for = ask_for_tensor, More const& ask_for_more = ask_for_parts) {
  constexpr size_t kAhead = 8;
  size_t const n = tensors.size();
  if (i + 3 * kAhead < n) {
    __builtin_prefetch(at_place(tensors, i + 3 * kAhead));
  }
  if (i + 2 * kAhead < n) {
    if (at::Tensor const* const t = at_place(tensors, i + 2 * kAhead)) {
      ask_for(*t);
    }
  }
  if (i + kAhead < n) {
    if (at::Tensor const* const t = at_place(tensors, i + kAhead)) {
      ask_for_more(*t);
    }
  }
}

// Like `ask_ahead`, for a loop that reads only addresses and sizes.
inline void ask_ahead_for_memory(OptionalTensors const& tensors, size_t i) {
  constexpr size_t kAhead = 4;
  if (i + 2 * kAhead < tensors.size() && tensors[i + 2 * kAhead]) {
    ask_for_tensor(*tensors[i + 2 * kAhead]);
  }
  if (i + kAhead < tensors.size() && tensors[i + kAhead] && tensors[i + kAhead]->has_storage()) {
    __builtin_prefetch(tensors[i + kAhead]->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
}

// Calls visit(i, tensor) for each tensor of a list, in order. Skips empty entries.
template <class List, class Visit>
void for_each(List const& tensors, Visit const& visit) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    if (at::Tensor const* const t = at_place(tensors, i)) {
      visit(i, *t);
    }
  }
}

// True if test(i, tensor) is true for a tensor. Does not visit the tensors after that one.
template <class Test>
bool any_of(Tensors const& tensors, Test const& test) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    if (test(i, *tensors[i])) {
      return true;
    }
  }
  return false;
}

// Like `ask_ahead`, for a loop that also reads the gradient of each tensor.
inline void ask_ahead_for_gradients(Tensors const& tensors, size_t i) {
  constexpr size_t kAhead = 3;
  ask_ahead(tensors, i, ask_for_tensor, ask_for_gradient);
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

// True if test(i, gradient) is true for the gradient of a parameter, which is undefined where there is none.
template <class Test>
bool any_gradient_of(Tensors const& params, Test const& test) {
  for (size_t i = 0; i < params.size(); ++i) {
    ask_ahead_for_gradients(params, i);
    if (test(i, grad_of(*params[i]))) {
      return true;
    }
  }
  return false;
}

}  // namespace amp_engine
