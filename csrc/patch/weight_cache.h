// Half casts of FP32 weights for the uses of one iteration. amp_engine/casting/cache.py documents the guarantees.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <vector>

namespace amp_engine::patch {

class WeightCache {
 public:
  struct Cast {
    pybind11::object tensor;
    bool was_made;  // false: it was found
  };

  // The kept casts.
  std::vector<at::Tensor> kept() const;

  // The tensor that `cast` would find, as a new reference. Null if `cast` would make it.
  PyObject* find(at::Tensor const& weight, at::ScalarType low) const;

  // Returns the weight in type `low`. Gradients flow to the weight.
  Cast cast(at::Tensor weight, at::ScalarType low);

  void clear();

 private:
  using Impl = c10::TensorImpl;

  struct Entry {
    c10::weak_intrusive_ptr<Impl, c10::UndefinedTensorImpl> weight;  // keeps the key unique, but not the weight alive
    pybind11::object object;
    // A second reference to the cast. Without it, the reference of each call would come and go as the first one besides
    // the Python object's, and for that torch takes the GIL and counts the object's references.
    at::Tensor cast;
    uint32_t version, cast_version;
    void const* address;  // of the weight
    bool requires_grad;

    bool is_current(at::Tensor const& weight, at::ScalarType low) const;
  };

  // Making or freeing a Python object lets other threads and garbage collections call this class. So objects are freed
  // only when the table is whole.
  ska::flat_hash_map<Impl*, Entry> entries_;
  uint64_t clears_ = 0;

  // True once a backward went through one of the casts: all are discarded when the next one is asked for outside of a
  // backward. The autograd nodes of casts share it.
  std::shared_ptr<std::atomic<bool>> const is_spent_ = std::make_shared<std::atomic<bool>>(false);

  bool is_over() const;
};

}  // namespace amp_engine::patch
