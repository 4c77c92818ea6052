// Low-precision copies of FP32 weights. amp_engine/casting/cache.py documents the guarantees.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

namespace amp_engine::patch {

class WeightCache {
 public:
  struct Cast {
    pybind11::object tensor;
    bool was_made;  // false: it was found
  };

  // The number of copies that are casts of their weights now.
  size_t size() const;

  // The tensor that `cast` would find, with its autograd edge if needed, as a new reference. Null if `cast` would make
  // it.
  PyObject* find(at::Tensor const& weight, at::ScalarType low);

  // Returns the weight in type `low`. Gradients flow to the weight.
  Cast cast(at::Tensor weight, at::ScalarType low);

  // After a backward other code may have written any weight, so no copy is a cast any more. Copies that a step writes,
  // or may write next, keep their memory.
  void after_backward();

  // Frees the weights that only their own casts keep alive. Only for versions of torch in which a tensor that C++ holds
  // keeps a reference to its Python object.
  void discard_orphans();

  void clear();

  struct Handed {
    uint64_t step;  // identifies the step in calls of `written`
    std::vector<std::optional<at::Tensor>> copies;
  };

  // For a step that writes copies together with the weights. Returns the copy of each weight that has one. The copies
  // are exact now, and no graph and no other step holds their memory. `unfinished` is a step that ended without a call
  // of `written`, or 0.
  Handed copies(std::vector<at::Tensor> const& weights, uint64_t unfinished);

  // The step has written the weights and the copies that it got. These are casts until other code may write.
  void written(std::vector<at::Tensor> const& weights, uint64_t step);

  // A CUDA graph writes the weights at each replay, and nothing reports that. So copies of these weights are never read
  // again. Steps get the same copies as the last time.
  void leave(std::vector<at::Tensor> const& weights);

 private:
  using Impl = c10::TensorImpl;
  using WeakImpl = c10::weak_intrusive_ptr<Impl, c10::UndefinedTensorImpl>;

  enum class State : char { current, outdated, wrong };

  // The code that may write a copy while other threads run.
  enum class Writer : char { none, renewal, step };

  // An alias of a copy. `tensor` is a second reference that stays. Without it, the reference of each call would come
  // and go as the first one besides the Python object's, and for that torch takes the GIL and counts the object's
  // references.
  struct Alias {
    pybind11::object object;
    at::Tensor tensor{};
  };

  struct Entry {
    WeakImpl weight;  // keeps the key unique, but not the weight alive
    at::Tensor copy{};
    uint32_t version = 0;  // of the weight when it was copied
    uint32_t copy_version = 0;
    void const* address = nullptr;
    State state = State::current;
    Writer writer = Writer::none;
    uint64_t step = 0;     // number of the step, if the writer is a step
    bool stepped = false;  // steps write this copy
    bool is_left = false;  // permanently, see `leave`
    // Aliases of `copy`, so that the use count of its storage tells whether a graph holds one. `plain` has no gradient.
    // `connected` has an autograd edge to the weight, which keeps the weight and its Python object alive.
    Alias plain, connected;
  };

  static bool is_current(Entry const& entry, at::Tensor const& weight, at::ScalarType low);
  static bool is_exact(Entry const& entry, at::Tensor const& weight);
  static void mark(Entry& entry, at::Tensor const& weight);
  static Alias alias(at::Tensor tensor);
  at::Tensor renew(at::Tensor const& weight, at::ScalarType low);
  void discard_aliases(at::Tensor const& weight);
  void sweep();

  // Making or freeing a Python object lets other threads and garbage collections call this class. So the methods look
  // entries up again after that, and free objects only when the table is whole.
  ska::flat_hash_map<Impl*, Entry> entries_;
  // Counts events that can make a copy wrong while it is being made: possible writes of weights, and steps that
  // got copies.
  uint64_t changes_ = 0;
  uint64_t steps_ = 0;
  size_t sweep_at_ = 64;
};

}  // namespace amp_engine::patch
