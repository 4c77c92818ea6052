// Tensor lists -> work table. Host code, no PyTorch.
#pragma once

#include <vector>

#include "backend.h"

namespace amp_engine {

struct Chunking {
  std::vector<Chunk> chunks;           // tensor by tensor, in list order; an empty tensor has none
  std::vector<uint32_t> first_chunk;   // of each tensor
  uint64_t const version;              // that no other one has; not 0

  // Throws std::length_error beyond 2^32 - 1 chunks, which is 2^47 elements.
  explicit Chunking(std::vector<int64_t> const& numels);
};

// What CheckArgs points to. Columns of addresses are uploaded each by itself: those of gradients may change in every step.
struct CheckLists {
  std::vector<ListShape> shapes;
  std::vector<void*> x, y, out;  // none of y or out: null
};

// What StepArgs points to.
struct StepLists {
  std::vector<Row> rows;  // built once, with the chunks
  std::vector<void*> gradients;
  std::vector<GradientForm> forms;
};

// Where each tensor's part of LAMB's scratch begins, and where the last one's ends: in floats, at multiples of 64 bytes.
std::vector<int64_t> lamb_offsets(std::vector<Row> const& rows);

inline int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace amp_engine
