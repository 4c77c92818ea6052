// Low-precision gradients that are held for a step, by references to their memory.
//
// From torch 2.13 on, a storage calls its materializer before it gives out a pointer for writing. The materializer that
// is set here first copies the whole storage, because several gradients may be views of it (a bucket of DDP). Before
// torch 2.13, a held gradient is a copy-on-write clone. Gradients for which neither is possible are copied at once:
//   - memory of numpy or DLPack, and storages with another materializer
//   - before torch 2.13, shared memory, because the whole storage would become copy-on-write
//   - before torch 2.13 or without CUDA kernels, memory of a GPU on another stream than the default one
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ahead.h"

namespace amp_engine {

// The values of a held gradient are lost in a way that torch does not report.
struct GradientLost : std::runtime_error {
  explicit GradientLost(size_t row)
      : std::runtime_error(
            "The gradient that amp holds for parameter " + std::to_string(row) +
            " of this optimizer is lost: after scale_loss() was left its memory was replaced by resize_() or _lazy_clone(), or "
            "another thread was writing it just then.  Nothing was stepped.  Call optimizer.zero_grad() and run the backward "
            "again, and leave that write out or put it after step().") {}
};

// A copy of a tensor. If possible, it is copy-on-write: the memory is copied when either tensor is written.
at::Tensor copy(at::Tensor const& t);

class Held {
 public:
  explicit Held(size_t n) : rows_(n) {}
  Held(Held const&) = delete;
  ~Held();

  // Holds a dense gradient in row i, which must be empty. `is_shared`: other tensors may have the same storage.
  void hold(size_t i, at::Tensor const& gradient, bool is_shared);

  size_t size() const { return rows_.size(); }
  bool has(size_t i) const { return rows_[i].storage; }
  at::ScalarType type(size_t i) const { return rows_[i].type; }
  at::Device device(size_t i) const { return rows_[i].storage.device(); }
  int64_t numel(size_t i) const { return rows_[i].numel; }
  // True if the row has the shape of `t` and the same order in memory.
  bool is_laid_out_as(size_t i, at::Tensor const& t) const;
  // The current address of the values. Raises GradientLost.
  void const* data(size_t i) const;
  // A tensor that uses the memory of the values.
  at::Tensor tensor(size_t i) const;
  OptionalTensors tensors() const;
  void discard(size_t i) { discard(rows_.at(i)); }
  // Moves row rows[i] to row i of the result. -1 leaves row i empty. The moved rows are empty here afterwards.
  std::shared_ptr<Held> rearranged(std::vector<int64_t> const& rows);
  // The rows whose gradient may have been written since it was held.
  std::vector<int64_t> written() const;

 private:
  // Keeps a storage armed, which means that a materializer of ours copies it before a write. The destructor disarms it.
  class Armed {
   public:
    explicit Armed(c10::Storage storage) : storage_(std::move(storage)) {}
    Armed(Armed const&) = delete;
    ~Armed() { disarm(storage_); }

   private:
    c10::Storage storage_;
  };

  struct Row {
    c10::Storage storage;  // of the gradient, or of a copy of it
    void const* address = nullptr;  // of the storage's memory
    int64_t offset = 0;             // of the gradient in the storage, in elements
    int64_t numel = 0;
    at::ScalarType type = at::kFloat;
    bool is_armed = false;            // `storage` is the gradient's own, and its materializer copies it before a write
    std::shared_ptr<Armed> shared{};  // set if several rows may have this storage
    c10::impl::SizesAndStrides layout{};
  };

  static void disarm(c10::Storage const& storage);
  c10::Storage storage_of_values(size_t i) const;
  static void discard(Row& row);

  std::vector<Row> rows_;
  std::unordered_map<c10::StorageImpl const*, std::weak_ptr<Armed>> shared_;
};

}  // namespace amp_engine
