// PyTorch's thread pool of one thread, so that the CPU backend compiles without PyTorch.
#pragma once

#include <cstdint>

namespace at {

inline int get_num_threads() { return 1; }
inline bool in_parallel_region() { return false; }

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t, Body const& body) {
  if (begin < end) {
    body(begin, end);
  }
}

}  // namespace at
