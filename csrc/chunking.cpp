#include "chunking.h"

#include <stdexcept>

namespace amp_engine {

Chunking::Chunking(std::vector<int64_t> const& numels) {
  first_chunk.reserve(numels.size());
  for (size_t t = 0; t < numels.size(); ++t) {
    int64_t const n = chunks_of(numels[t]);
    if (int64_t(chunks.size()) + n > int64_t(UINT32_MAX)) {
      throw std::length_error("amp_engine: more than 2^47 elements in one list of tensors");
    }
    first_chunk.push_back(uint32_t(chunks.size()));
    for (int64_t i = 0; i < n; ++i) {
      chunks.push_back({uint32_t(t), uint32_t(i)});
    }
  }
}

}  // namespace amp_engine
