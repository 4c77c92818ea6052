// Low-precision copies of FP32 weights. amp_engine/casting/cache.py says what is promised.
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
    bool was_made;  // rather than found
  };

  // How many copies are the casts of their weights now.
  size_t size() const;

  // What `cast` would find, with its edge where that is needed, as a new reference; null where it would make something.
  PyObject* find(at::Tensor const& weight, at::ScalarType low);

  // The weight in type `low`; gradients flow to the weight.
  Cast cast(at::Tensor weight, at::ScalarType low);

  // Anybody may have written any weight: no copy is a cast any more. Those that a step writes, or may write next, keep
  // their memory.
  void after_backward();

  // Free the weights that nobody but their own casts keeps alive. Only where a tensor that C++ holds keeps the
  // reference count of its Python object up.
  void discard_orphans();

  // Discard everything.
  void clear();

  struct Handed {
    uint64_t step;  // by which `written` knows it
    std::vector<std::optional<at::Tensor>> copies;
  };

  // For a step that writes copies beside the weights: the copy of each weight that has one, exact as of now, whose
  // memory no graph and no other step holds. `unfinished` is a step that ended without a word, or 0.
  Handed copies(std::vector<at::Tensor> const& weights, uint64_t unfinished);

  // The step has written the weights, and what it was handed: casts of their weights until anybody else may write.
  void written(std::vector<at::Tensor> const& weights, uint64_t step);

  // A CUDA graph writes the weights at each replay, of which nobody is told: no copy of them is read any more. Steps are
  // handed what they were handed last.
  void leave(std::vector<at::Tensor> const& weights);

 private:
  using Impl = c10::TensorImpl;
  using WeakImpl = c10::weak_intrusive_ptr<Impl, c10::UndefinedTensorImpl>;

  enum class State : char { current, outdated, wrong };

  // Who may write a copy while other threads run.
  enum class Writer : char { none, renewal, step };

  // An alias of a copy. With the object's reference alone to its tensor, each call's own would come and go as the first
  // beside it, for which torch takes the GIL and counts the object's references; so there is one that stays.
  struct Alias {
    pybind11::object object;
    at::Tensor tensor{};
  };

  struct Entry {
    WeakImpl weight;  // keeps the key unique, not the weight alive
    at::Tensor copy{};
    uint32_t version = 0;  // of the weight when it was copied
    uint32_t copy_version = 0;
    void const* address = nullptr;
    State state = State::current;
    Writer writer = Writer::none;
    uint64_t step = 0;     // which one, where a step is the writer
    bool stepped = false;  // a step writes it
    bool is_left = false;  // for good, see `leave`
    // Aliases of `copy`, so that its storage tells whether a graph holds one: without gradient, and with an autograd
    // edge to the weight, which keeps the weight alive, and its Python object.
    Alias plain, connected;
  };

  static bool is_current(Entry const& entry, at::Tensor const& weight, at::ScalarType low);
  static bool is_exact(Entry const& entry, at::Tensor const& weight);
  static void stamp(Entry& entry, at::Tensor const& weight);
  static Alias alias(at::Tensor tensor);
  at::Tensor renew(at::Tensor const& weight, at::ScalarType low);
  void discard_aliases(at::Tensor const& weight);
  void sweep();

  // Whatever makes or frees a Python object lets other threads, and collections of garbage, come here: entries are
  // found again after it, and freed when the table is whole.
  ska::flat_hash_map<Impl*, Entry> entries_;
  // Counts what may make a copy wrong that is just being made: weights that may have been written, or a step that was
  // given memory.
  uint64_t changes_ = 0;
  uint64_t steps_ = 0;
  size_t sweep_at_ = 64;
};

}  // namespace amp_engine::patch
