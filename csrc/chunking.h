// Divides lists of tensors into chunks. Host code without PyTorch.
#pragma once

#include <vector>

#include "backend.h"

namespace amp_engine {

struct Chunking {
  std::vector<Chunk> chunks;           // ordered by tensor, in list order; an empty tensor has none
  std::vector<uint32_t> first_chunk;   // of each tensor
  uint64_t const version;              // unique in the process; not 0

  // Throws std::length_error for more than 2^32 - 1 chunks, which is 2^47 elements.
  explicit Chunking(std::vector<int64_t> const& numels);
};

// The tables that CheckArgs points to. Each column of addresses is uploaded separately, because the addresses of
// gradients may change in every step.
struct CheckLists {
  std::vector<ListShape> shapes;
  std::vector<void*> x, y, out;  // y or out may be empty: CheckArgs has null then
};

// The tables that StepArgs points to.
struct StepLists {
  std::vector<Row> rows;  // built once, together with the chunks
  std::vector<void*> gradients;
  std::vector<GradientForm> forms;
};

// The offset of each tensor's part of LAMB's scratch, and the end of the last part, in floats. Aligned to 64 bytes.
std::vector<int64_t> lamb_offsets(std::vector<Row> const& rows);

inline int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace amp_engine
