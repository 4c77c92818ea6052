// Loops over parameters, for which Python would take a microsecond or more each. amp_engine/kernels/reference_tensor_lists.py
// has the same in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ahead.h"
#include "held.h"

namespace amp_engine {

// tensor._version() goes through a table of autograd's. Not of inference tensors, which keep none.
inline uint32_t version_of(at::Tensor const& t) {
  return t.unsafeGetTensorImpl()->version_counter().current_version();
}

// What tells that a tensor was written or replaced.
struct Stamp {
  void const *storage, *address;
  int64_t version;
  at::ScalarType type;
  at::Device device;

  static Stamp of(at::Tensor const& t);
  bool operator==(Stamp const&) const = default;
};

// What tells that the gradient of a parameter was replaced or written since, for as long as it is alive. A write past
// its version moves copy-on-write memory that another tensor holds as well.
struct GradientStamp {
  void const* gradient;
  int64_t version;
  void const* memory;

  static GradientStamp of(at::Tensor const& param);
  bool operator==(GradientStamp const&) const = default;
};

// Some tensors as they were when each was last marked. The caller passes the same tensors each time.
class Marks {
 public:
  void mark(Tensors const& tensors);
  void mark(size_t i, at::Tensor const& t);
  // What `other` has at `j` is what this has at `i`.
  void take(size_t i, Marks const& other, size_t j);

  // Whether one was written or replaced since.
  bool have_moved(Tensors const& tensors) const;
  bool has_moved(size_t i, at::Tensor const& t) const;
  // Whether a tensor has nothing new but its memory: `tensor.data = x`.
  bool has_other_memory(size_t i, at::Tensor const& t) const;

 private:
  std::vector<Stamp> stamps_;
  // Known, so that no other storage gets an address that a stamp has; what is in them may be freed.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

// The gradients of some parameters as they were. They tell for as long as the gradients are alive.
class GradientMarks {
 public:
  explicit GradientMarks(Tensors const& params);

  // Whether a gradient came, went, was replaced or written since.
  bool have_moved(Tensors const& params) const;
  // Where, and whether there was one.
  std::vector<std::pair<size_t, bool>> moved(Tensors const& params) const;

 private:
  std::vector<GradientStamp> stamps_;
};

// How the kernels can take a gradient.
enum class Access : char { none, own, shared, other };

struct Gradients {
  // The gradient of each parameter, and how it can be taken: `own` memory, memory `shared` with other tensors, or not
  // at all (`other`: sparse, of another type, a subclass with a dispatch of its own, in another order than its parameter,
  // a view that negates its memory).
  OptionalTensors tensors;
  // Instead of `tensors` where they were to be held and can be taken.
  std::shared_ptr<Held> held;
  std::string accesses;
  // Where those are that can be taken: each device once.
  std::vector<at::Device> devices;
};
// Holds the gradients of the parameters whose byte in `mask` is not 0; none without a mask.
Gradients gradients(Tensors const& params, std::string const* mask = nullptr);

// tensors[i] where mask[i] != 0, else none.
OptionalTensors where(std::string const& mask, OptionalTensors const& tensors);

// Whether one of them has a gradient.
bool any_gradient(Tensors const& tensors);

// Has torch tell of whoever asks for the memory of the gradients from now on, where it can.
void watch_gradients(Tensors const& params);

// Whether nobody has asked for the memory of any gradient since it was watched, or has it from before.
bool are_gradients_unwritten(Tensors const& params);

// tensor.grad = None for each.
void discard_gradients(Tensors const& tensors);

}  // namespace amp_engine
