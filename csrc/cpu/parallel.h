// Distributes chunks over PyTorch's thread pool. The results do not depend on which thread computes which chunk.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "math/rows.h"

namespace amp_engine::cpu {

// A loop over many small tensors prefetches the data of the tensor that is so many places ahead.
constexpr int64_t kAhead = 8;

// Calls body(tensor, chunk) for every chunk whose tensor takes part. A thread takes eight chunks in a row (1 MB of
// float32) and then the next eight that are free, because on shared machines cores are not equally fast.
template <class TakesPart, class Body>
void for_each_chunk(Chunk const* chunks, int64_t n_chunks, TakesPart const& takes_part, Body const& body) {
  constexpr int64_t kShare = 8;
  std::atomic<int64_t> next{0};
  auto const work = [&] {
    for (int64_t first; (first = next.fetch_add(kShare, std::memory_order_relaxed)) < n_chunks;) {
      for (int64_t i = first; i < std::min(first + kShare, n_chunks); ++i) {
        if (takes_part(chunks[i].tensor)) {
          body(chunks[i].tensor, chunks[i].index);
        }
      }
    }
  };
  int64_t const threads = std::min<int64_t>(at::get_num_threads(), (n_chunks + kShare - 1) / kShare);
  if (threads <= 1 || at::in_parallel_region()) {
    work();
  } else {
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
  }
}

}  // namespace amp_engine::cpu
