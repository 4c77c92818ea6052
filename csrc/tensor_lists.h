// Loops over parameters. In Python each parameter would take a microsecond or more.
// amp_engine/kernels/reference_tensor_lists.py has the same functions in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ahead.h"
#include "ops.h"

namespace amp_engine {

// Reads the counter directly, because tensor._version() makes a virtual call into autograd. Not for inference tensors,
// which have no version.
inline uint32_t version_of(at::Tensor const& t) {
  return t.unsafeGetTensorImpl()->version_counter().current_version();
}

// The mark of one tensor at one moment. It tells later if the tensor was written or replaced.
struct Mark {
  void const *storage, *address;
  int64_t version;
  at::ScalarType type;
  at::Device device;

  static Mark of(at::Tensor const& t);
  bool operator==(Mark const&) const = default;
};

// Gives distinct tensors that count their writes together, as parameters made of views of one tensor do, a count each.
// Writes through other views of that tensor no longer count for them, for autograd either.
void count_apart(Tensors const& tensors);

// The mark of a parameter's gradient. It tells if the gradient was replaced or written, as long as the gradient is
// alive. `memory` detects `grad.data = x`, which does not bump the version.
struct GradientMark {
  void const* gradient;
  int64_t version;
  void const* memory;

  static GradientMark of(at::Tensor const& grad);
  bool operator==(GradientMark const&) const = default;
};

// Marks of some tensors, each from the last `mark` of its tensor. The caller passes the same tensors each time.
class Marks {
 public:
  void mark(Tensors const& tensors);
  void mark(size_t i, at::Tensor const& t);
  // Marks tensors whose mark was right until one operation of this package wrote each. Reads no tensor.
  void bump();
  // Copies mark `j` of `other` to mark `i`.
  void take(size_t i, Marks const& other, size_t j);

  // True if a tensor was written or replaced since its mark.
  bool have_moved(Tensors const& tensors) const;
  bool has_moved(size_t i, at::Tensor const& t) const;
  // True if the memory of the tensor is all that differs from its mark, as after `tensor.data = x`.
  bool has_other_memory(size_t i, at::Tensor const& t) const;

 private:
  std::vector<Mark> marks_;
  // Weak references, so that no new storage gets an address that a mark has. They do not keep the data alive.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

// Marks of the gradients of some parameters. They are valid as long as the gradients are alive.
class GradientMarks {
 public:
  // No mark yet, and memory for those of n parameters.
  explicit GradientMarks(size_t n) { marks_.reserve(n); }
  explicit GradientMarks(Tensors const& params);
  // Adds the mark of the next parameter's gradient, which is undefined if there is none.
  void add(at::Tensor const& grad) { marks_.push_back(GradientMark::of(grad)); }

  // True if a gradient was added, removed, replaced or written since its mark.
  bool have_moved(Tensors const& params) const;
  // The indices of these gradients. The flag is true if there was a gradient at the time of the mark.
  std::vector<std::pair<size_t, bool>> moved(Tensors const& params) const;

 private:
  std::vector<GradientMark> marks_;
};

// How the kernels can reach a gradient. See Gradients::accesses.
enum class Access : char { none, taken, other };

struct Gradients {
  OptionalTensors tensors;
  // An Access for each parameter. `other`: the kernels cannot take the gradient. It is sparse, has another type, is a
  // subclass with a dispatch of its own, has gaps or overlaps, lies in another order than its parameter, or is a view that
  // negates its memory.
  std::string accesses;
  // The devices of the gradients that the kernels can reach, each device once.
  std::vector<at::Device> devices;
  bool has_graph = false;  // true if a gradient has a graph, as after backward(create_graph=True)
};
Gradients gradients(Tensors const& params);

// Returns tensors[i] where mask[i] != 0, else nothing.
OptionalTensors where(std::string const& mask, OptionalTensors const& tensors);

// The memory of a float32 tensor.
struct Place {
  at::Tensor base;
  int64_t offset = 0, numel = 0;  // in floats
  float* data = nullptr;

  // True if no tensor is left in this memory, and `half` fits.
  bool is_free_for(at::Tensor const& half) const;
  at::Tensor laid_out_as(at::Tensor const& half) const;
};

// Memory of gradients. A GPU's allocator keeps such memory; glibc returns it to the system, which fills each page with
// zeros when it is needed again. On a CPU `look` therefore writes float32 gradients where the last ones were, when nothing
// refers to these any more: an exit and a step of 50 million parameters else take 1.75 times as long. It keeps one half
// gradient, the last in memory, until the next look: glibc returns what is free at the end of its heap, and the next
// backward would take twice as long.
struct GradientMemory {
  std::vector<Place> places;  // one for each parameter, or none
  std::vector<void*> addresses;  // those of `places` that the last look wrote, or null
  c10::Storage end;  // that half gradient, or nothing
  // True: a CPU writes past its caches. Default: true if the memory is used again, and a step does not fit into them.
  std::optional<bool> streams = std::nullopt;

  void clear() {
    places.clear();
    end = {};
  }
};

// Returns where each gradient is written unscaled: in new float32 memory if it is half and its byte in `plain` is 0, else
// in the gradient itself.
OptionalTensors unscaled_outputs(std::string const& plain, OptionalTensors const& gradients);

// Sets params[i].grad = after[i] where that is another tensor than before[i].
void replace_gradients(Tensors const& params, OptionalTensors const& before, OptionalTensors const& after);

struct Looked {
  Checks checks;
  std::string accesses;       // see Gradients
  OptionalTensors gradients;  // after the look
  GradientMarks marks;        // of these
  bool kept;                  // true: half gradients beside masters are still scaled
};

// Checks the gradients of `params` in one pass, and unscales them if `unscales` is true: half ones beside masters (0 in
// `plain`) become float32, all others are unscaled in place. If `keeps_half` is true and all gradients beside masters are
// half, these stay as they are. Returns nothing, and has changed nothing, if there is no gradient, or the kernels cannot
// take each of them on the device of `found_inf`, or would unscale one with a graph.
//   memory     of the last look at these parameters
//   scale      float32 []: gradients are divided by it
//   found_inf, norm, update   see ListOperation::run
std::optional<Looked> look(ListOperation& check, GradientMemory& memory, Tensors const& params,
                           std::string const& plain, bool unscales, bool keeps_half, at::Tensor const& scale,
                           at::Tensor const& found_inf, at::Tensor const& norm, ScaleTensors const* update);

bool any_gradient(Tensors const& tensors);

// True if a gradient has a graph.
bool any_graph(Tensors const& tensors);

// True if the access to a gradient is `other`.
bool any_other(Tensors const& params);

// Sets tensor.grad = None for each tensor.
void discard_gradients(Tensors const& tensors);

}  // namespace amp_engine
