// Low-precision gradients that are held for a step, as references to their memory.
//
// From torch 2.13 on a storage calls a function, its materializer, before it gives anybody a pointer to write: the one
// that is set here copies the memory first, all of it, as several gradients may be views of it (a bucket of DDP). Before,
// a held gradient is a copy-on-write clone. Memory that does not allow it is copied at once: of others (numpy, DLPack),
// with a function of somebody else, and before torch 2.13 shared memory, which must not become copy-on-write as a whole,
// and a GPU's on another stream than the default one.
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

// The values of a held gradient are gone, in a way that torch does not tell.
struct GradientLost : std::runtime_error {
  explicit GradientLost(size_t row)
      : std::runtime_error(
            "The gradient that amp holds for parameter " + std::to_string(row) +
            " of this optimizer is lost: after scale_loss() was left its memory was replaced by resize_() or _lazy_clone(), or "
            "another thread was writing it just then.  Nothing was stepped.  Call optimizer.zero_grad() and run the backward "
            "again, and leave that write out or put it after step().") {}
};

// A copy of a tensor with its own memory, which is copied when either is written, where that is possible.
at::Tensor copy(at::Tensor const& t);

class Held {
 public:
  explicit Held(size_t n) : rows_(n) {}
  Held(Held const&) = delete;
  ~Held();

  // Holds a dense gradient in a row that has none. `is_shared`: its storage may have other tensors as well.
  void hold(size_t i, at::Tensor const& gradient, bool is_shared);

  size_t size() const { return rows_.size(); }
  bool has(size_t i) const { return rows_[i].storage; }
  at::ScalarType type(size_t i) const { return rows_[i].type; }
  at::Device device(size_t i) const { return rows_[i].storage.device(); }
  int64_t numel(size_t i) const { return rows_[i].numel; }
  // Whether the row has this shape and this order in memory.
  bool is_laid_out_as(size_t i, at::Tensor const& t) const;
  // Where the values are now. Raises GradientLost.
  void const* data(size_t i) const;
  // A tensor of the values.
  at::Tensor tensor(size_t i) const;
  OptionalTensors tensors() const;
  void discard(size_t i) { discard(rows_.at(i)); }
  // rows[i] gives the row that goes to row i, or -1. Nothing is left here.
  std::shared_ptr<Held> rearranged(std::vector<int64_t> const& rows);
  // Rows whose gradient may have been written since.
  std::vector<int64_t> written() const;

 private:
  // A storage that calls before it is written, for as long as this lives.
  class Armed {
   public:
    explicit Armed(c10::Storage storage) : storage_(std::move(storage)) {}
    Armed(Armed const&) = delete;
    ~Armed() { disarm(storage_); }

   private:
    c10::Storage storage_;
  };

  struct Row {
    c10::Storage storage;  // of the gradient, or of a copy
    void const* address = nullptr;  // of the storage
    int64_t offset = 0;             // of the gradient in it, in elements
    int64_t numel = 0;
    at::ScalarType type = at::kFloat;
    bool is_armed = false;            // the storage is the gradient's, and calls before it is written
    std::shared_ptr<Armed> shared{};  // of several rows
    c10::impl::SizesAndStrides layout{};
  };

  static void disarm(c10::Storage const& storage);
  c10::Storage storage_of_values(size_t i) const;
  static void discard(Row& row);

  std::vector<Row> rows_;
  std::unordered_map<c10::StorageImpl const*, std::weak_ptr<Armed>> shared_;
};

}  // namespace amp_engine
