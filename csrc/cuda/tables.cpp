#include "cuda/tables.h"

#include <algorithm>

#include "../backend.h"
#include "cuda/device.h"

namespace amp_engine::cuda {
namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void const* Tables::upload(TableOf what, void const* table, size_t bytes, Stream stream, uint64_t version) {
  if (bytes == 0) {
    return nullptr;
  }
  std::unique_ptr<Mirror>& mirror = mirrors_[size_t(what)];
  if (!mirror || mirror->size() != bytes) {
    mirror = std::make_unique<Mirror>(slots_, allocate_, bytes);
  }
  return mirror->upload(table, stream, version);
}

Buffer Tables::scratch(size_t bytes, Stream stream) {
  if (slots_.device().capture(stream)) {
    return allocate_(bytes);
  }
  // Each stream's own, as a Mirror's buffer.
  if (!scratch_ || scratch_bytes_ < bytes || scratch_stream_ != stream) {
    scratch_.reset();
    scratch_ = allocate_(bytes);
    scratch_bytes_ = bytes;
    scratch_stream_ = stream;
  }
  return scratch_;
}

Tables& TablesByDevice::on(int device) {
  auto const allocate = [this, device](size_t bytes) { return allocate_(device, bytes); };
  return tables_.try_emplace(device, slots(device), allocate).first->second;
}

StepScratch::StepScratch(int64_t n_tensors, int64_t n_chunks, int64_t lamb_floats)
    : partials(size_t(n_tensors) * kCoefficientBytes),
      lamb_steps(aligned(partials + (lamb_floats ? 2 * size_t(n_chunks) * sizeof(Partial) : 0))),
      end(std::max(kAlignment, lamb_steps + size_t(lamb_floats) * sizeof(float))) {}

}  // namespace amp_engine::cuda
