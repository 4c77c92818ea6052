// Chunks over threads, in PyTorch's own thread pool. Which thread does which chunk shows in no result.
#pragma once

#include <ATen/Parallel.h>

#include "math/rows.h"

namespace amp_engine::cpu {

// Calls body(tensor, chunk) for every chunk of tensors [0, n), of numel(tensor) elements each. The elements are
// shared out equally, so that neither many small tensors nor one large one leave a thread idle.
template <class Numel, class Body>
void for_each_chunk(int64_t n, Numel const& numel, Body const& body) {
  int64_t total = 0;
  for (int64_t t = 0; t < n; ++t) {
    total += numel(t);
  }
  // A thread takes the chunks that begin in its share [begin, end) of all elements.
  at::parallel_for(0, total, kChunk, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // element of all that the tensor begins with
    for (int64_t t = 0; t < n && first < end; ++t) {
      int64_t const last = first + numel(t);
      int64_t chunk = begin > first ? (begin - first + kChunk - 1) / kChunk : 0;
      for (; first + chunk * kChunk < (last < end ? last : end); ++chunk) {
        body(t, chunk);
      }
      first = last;
    }
  });
}

}  // namespace amp_engine::cpu
