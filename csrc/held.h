// Low-precision gradients that are held for a step, as references to their memory.
//
// From torch 2.13 on a storage calls a function, its materializer, before it gives anybody a pointer to write: the one
// that is set here copies the memory first. Before, a held gradient is a copy-on-write clone. Memory that allows neither
// is copied at once: shared with other tensors (a bucket of DDP), of others (numpy, DLPack), or told about already.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ahead.h"

namespace amp_engine {

class Held {
 public:
  explicit Held(size_t n) : rows_(n) {}
  Held(Held const&) = delete;
  ~Held();

  // Holds a dense gradient in a row that has none. `is_shared`: it shares its memory with other tensors.
  void hold(size_t i, at::Tensor const& gradient, bool is_shared);

  size_t size() const { return rows_.size(); }
  bool has(size_t i) const { return rows_[i].storage; }
  at::ScalarType type(size_t i) const { return rows_[i].type; }
  at::Device device(size_t i) const { return rows_[i].storage.device(); }
  int64_t numel(size_t i) const { return rows_[i].numel; }
  // Whether the row has this shape and this order in memory.
  bool is_laid_out_as(size_t i, at::Tensor const& t) const;
  // Where the values are now. Raises RuntimeError if they are lost.
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
  struct Row {
    c10::Storage storage;  // of the gradient, or of a copy
    void const* address = nullptr;
    int64_t numel = 0;
    at::ScalarType type = at::kFloat;
    bool is_armed = false;  // the storage is the gradient's, and calls before it is written
    c10::impl::SizesAndStrides layout;
  };

  c10::Storage storage_of_values(size_t i) const;
  static void discard(Row& row);

  std::vector<Row> rows_;
};

}  // namespace amp_engine
