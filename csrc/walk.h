// Loops over parameters, for which Python would take a microsecond or more each. amp_engine/kernels/walk.py has the
// same in Python.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_engine {

// What tells that a tensor was written or replaced: address, version, type, device. 32 bytes each, in order.
std::string stamps(std::vector<at::Tensor> const& tensors);

// How the kernels can take a gradient.
enum class Walk : char { none, own, shared, other };

struct Gradients {
  // The gradient of each parameter, and how it can be taken: `own` memory, memory `shared` with other tensors, or not
  // at all (`other`: sparse, of another type, a subclass, or in another order than its parameter).
  std::vector<std::optional<at::Tensor>> tensors;
  std::string walks;
  // Where those are that can be taken: each device once.
  std::vector<at::Device> devices;
};
Gradients gradients(std::vector<at::Tensor> const& params);

// A copy of each whose walk is not `none`: copy-on-write of its own memory, at once of shared memory, which must not
// become copy-on-write as a whole.
std::vector<std::optional<at::Tensor>> copies(std::vector<std::optional<at::Tensor>> const& tensors,
                                              std::string const& walks);

// Whether one of them has a gradient.
bool any_gradient(std::vector<at::Tensor> const& tensors);

// tensor.grad = None for each.
void drop_gradients(std::vector<at::Tensor> const& tensors);

}  // namespace amp_engine
