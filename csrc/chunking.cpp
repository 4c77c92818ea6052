#include "chunking.h"

#include <atomic>
#include <stdexcept>

namespace amp_engine {
namespace {

uint64_t next_version() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

}  // namespace

Chunking::Chunking(std::vector<int64_t> const& numels) : version(next_version()) {
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

std::vector<int64_t> lamb_offsets(std::vector<Row> const& rows) {
  std::vector<int64_t> begin{0};
  begin.reserve(rows.size() + 1);
  for (Row const& row : rows) {
    begin.push_back(begin.back() + (row.numel + 15) / 16 * 16);
  }
  return begin;
}

}  // namespace amp_engine
