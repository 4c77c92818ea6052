// The tables that an operation keeps on its devices for its kernels to read, and their scratch memory. Without PyTorch.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "chunking.h"
#include "cuda/mirror.h"

namespace amp_engine::cuda {

enum class TableOf { shapes, x, y, out, chunks, rows, gradients, forms, groups, lamb_steps };
constexpr size_t kTables = 10;

// The tables on one device, which must be current.
class Tables {
 public:
  Tables(Slots& slots, Allocate allocate) : slots_(slots), allocate_(std::move(allocate)) {}

  // See Mirror::upload. Null if the table is empty.
  template <class T>
  T const* upload(TableOf what, std::vector<T> const& table, Stream stream, uint64_t version = 0) {
    return static_cast<T const*>(upload(what, table.data(), table.size() * sizeof(T), stream, version));
  }

  // Memory for work that is queued on the stream while the result is held. Its earlier content is lost. In a capture
  // the graph gets memory of its own, because a replay writes there at any later time.
  Buffer scratch(size_t bytes, Stream stream);

 private:
  void const* upload(TableOf what, void const* table, size_t bytes, Stream stream, uint64_t version);

  Slots& slots_;
  Allocate allocate_;
  std::array<std::unique_ptr<Mirror>, kTables> mirrors_;
  Buffer scratch_;
  size_t scratch_bytes_ = 0;
  Stream scratch_stream_ = nullptr;
};

// Uploads the tables that have changed, and sets the pointers of `args` to the device copies.
void upload(Tables& tables, CheckArgs& args, CheckLists const& lists, Chunking const& chunking, Stream stream);
void upload(Tables& tables, StepArgs& args, StepLists const& lists, std::vector<Group> const& groups,
            Chunking const& chunking, Stream stream);

// The tables of each device. A device cannot use memory, slots or events of another one.
class TablesByDevice {
 public:
  using AllocateOn = std::function<Buffer(int device, size_t bytes)>;

  explicit TablesByDevice(AllocateOn allocate) : allocate_(std::move(allocate)) {}
  TablesByDevice(TablesByDevice const&) = delete;

  Tables& on(int device);

 private:
  AllocateOn allocate_;
  std::map<int, Tables> tables_;
};

// The offsets of the parts of a step's scratch, in bytes.
struct StepScratch {
  size_t partials, lamb_steps, end;  // the coefficients are at offset 0

  // `lamb_floats` is 0 for other formulas.
  StepScratch(int64_t n_tensors, int64_t n_chunks, int64_t lamb_floats);
};

}  // namespace amp_engine::cuda
