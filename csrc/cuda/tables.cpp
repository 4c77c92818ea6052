#include "cuda/tables.h"

#include <algorithm>

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
  // Scratch belongs to one stream, like a Mirror's buffer.
  if (!scratch_ || scratch_bytes_ < bytes || scratch_stream_ != stream) {
    scratch_.reset();
    scratch_ = allocate_(bytes);
    scratch_bytes_ = bytes;
    scratch_stream_ = stream;
  }
  return scratch_;
}

void upload(Tables& tables, CheckArgs& args, CheckLists const& lists, Chunking const& chunking, Stream stream) {
  args.shapes = tables.upload(TableOf::shapes, lists.shapes, stream);
  args.x = tables.upload(TableOf::x, lists.x, stream);
  args.y = tables.upload(TableOf::y, lists.y, stream);
  args.out = lists.out == lists.x ? args.x : tables.upload(TableOf::out, lists.out, stream);
  args.chunks = tables.upload(TableOf::chunks, chunking.chunks, stream, chunking.version);
}

void upload(Tables& tables, StepArgs& args, StepLists const& lists, std::vector<Group> const& groups,
            Chunking const& chunking, Stream stream) {
  args.rows = tables.upload(TableOf::rows, lists.rows, stream, chunking.version);
  args.gradients = tables.upload(TableOf::gradients, lists.gradients, stream);
  args.forms = tables.upload(TableOf::forms, lists.forms, stream);
  args.chunks = tables.upload(TableOf::chunks, chunking.chunks, stream, chunking.version);
  args.groups = tables.upload(TableOf::groups, groups, stream);
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
