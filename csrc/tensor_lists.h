// Loops over parameters, for which Python would take a microsecond or more each. amp_engine/kernels/reference_tensor_lists.py
// has the same in Python.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <string>
#include <vector>

#include "ahead.h"

namespace amp_engine {

// tensor._version() goes through a table of autograd's. Not of inference tensors, which keep none.
inline uint32_t version_of(at::Tensor const& t) {
  return t.unsafeGetTensorImpl()->version_counter().current_version();
}

// What tells that a tensor was written or replaced.
struct Stamp {
  void const* address;
  int64_t version;
  int type, device, index, unused;

  static Stamp of(at::Tensor const& t);
};
static_assert(sizeof(Stamp) == 32, "no padding, since stamps are compared byte by byte");

// What tells that the gradient of a parameter was replaced or written since, for as long as it is alive. A write past
// its version moves copy-on-write memory that another tensor holds as well.
struct GradientStamp {
  void const* gradient;
  int64_t version;
  void const* memory;

  static GradientStamp of(at::Tensor const& param);
};
static_assert(sizeof(GradientStamp) == 24);

// Writes the stamps of the tensors, in order.
template <class Stamp>
void put_stamps(Tensors const& tensors, char* out) {
  for_each(tensors, [&](size_t i, at::Tensor const& t) {
    Stamp const stamp = Stamp::of(t);
    std::memcpy(out + i * sizeof stamp, &stamp, sizeof stamp);
  });
}

// Whether these are the stamps of the tensors still.
template <class Stamp>
bool have_stamps(Tensors const& tensors, char const* stamps) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    Stamp const stamp = Stamp::of(*tensors[i]);
    if (std::memcmp(stamps + i * sizeof stamp, &stamp, sizeof stamp) != 0) {
      return false;
    }
  }
  return true;
}

// How the kernels can take a gradient.
enum class Access : char { none, own, shared, other };

struct Gradients {
  // The gradient of each parameter, and how it can be taken: `own` memory, memory `shared` with other tensors, or not
  // at all (`other`: sparse, of another type, a subclass with a dispatch of its own, in another order than its parameter,
  // a view that negates its memory).
  OptionalTensors tensors;
  std::string accesses;
  // Where those are that can be taken: each device once.
  std::vector<at::Device> devices;
};
Gradients gradients(Tensors const& params);

// A copy of each whose access is not `none`: copy-on-write of its own memory, at once of shared memory, which must not
// become copy-on-write as a whole.
OptionalTensors copies(OptionalTensors const& tensors, std::string const& accesses);

// first[i] where mask[i] != 0, else second[i], or none without a second.
OptionalTensors either(std::string const& mask, OptionalTensors const& first, OptionalTensors const* second);

// Whether one of them has a gradient.
bool any_gradient(Tensors const& tensors);

// Has torch tell of whoever asks for the memory of the gradients from now on, where it can.
void watch_gradients(Tensors const& params);

// Whether nobody has asked for the memory of any gradient since it was watched, or has it from before.
bool are_gradients_unwritten(Tensors const& params);

// tensor.grad = None for each.
void discard_gradients(Tensors const& tensors);

}  // namespace amp_engine
