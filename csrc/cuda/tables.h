// What an operation keeps on the devices that it is computed on: the tables that its kernels read, and their scratch.
// No PyTorch.
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

// On one device, which must be current.
class Tables {
 public:
  Tables(Slots& slots, Allocate allocate) : slots_(slots), allocate_(std::move(allocate)) {}

  // See Mirror::upload. Null if the table is empty.
  template <class T>
  T const* upload(TableOf what, std::vector<T> const& table, Stream stream, uint64_t version = 0) {
    return static_cast<T const*>(upload(what, table.data(), table.size() * sizeof(T), stream, version));
  }

  // Memory for what is queued on the stream while the result is held; whatever was there is lost. In a capture it is
  // the graph's own, since a replay writes there at any time later.
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

// Uploads what changed of the tables that an operation reads, and has `args` point there.
void upload(Tables& tables, CheckArgs& args, CheckLists const& lists, Chunking const& chunking, Stream stream);
void upload(Tables& tables, StepArgs& args, StepLists const& lists, std::vector<Group> const& groups,
            Chunking const& chunking, Stream stream);

// On every device: no memory, slot or event of one is any use to another.
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

// Where the scratch of a step lies in one piece of memory: bytes from its beginning.
struct StepScratch {
  size_t partials, lamb_steps, end;  // behind the coefficients

  // `lamb_floats`: 0 where the formula is another one.
  StepScratch(int64_t n_tensors, int64_t n_chunks, int64_t lamb_floats);
};

}  // namespace amp_engine::cuda
