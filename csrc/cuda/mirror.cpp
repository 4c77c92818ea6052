#include "cuda/mirror.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace amp_engine::cuda {
namespace {

constexpr size_t kSmallestSlot = 4096;
constexpr int kSpares = 1;  // per mirror

size_t capacity_for(size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallestSlot)); }

}  // namespace

Slot Slots::take(size_t bytes) {
  size_t const capacity = capacity_for(bytes);
  std::lock_guard const lock(mutex_);
  Size& size = sizes_[capacity];
  while (size.spare.size() < size.reserved) {
    size.spare.push_back(device_.make_slot(capacity));
  }
  if (!size.used.empty() && device_.is_done(size.used.front().event)) {
    Slot const slot = size.used.front();
    size.used.pop_front();
    return slot;
  }
  return device_.make_slot(capacity);
}

void Slots::give_back(Slot slot, size_t bytes) {
  std::lock_guard const lock(mutex_);
  sizes_[capacity_for(bytes)].used.push_back(slot);
}

Slot Slots::take_for_capture(size_t bytes) {
  size_t const capacity = capacity_for(bytes);
  std::lock_guard const lock(mutex_);
  Size& size = sizes_[capacity];
  if (size.spare.empty()) {
    return device_.make_slot(capacity);
  }
  Slot const slot = size.spare.back();
  size.spare.pop_back();
  return slot;
}

void Slots::reserve(size_t bytes, int count) {
  std::lock_guard const lock(mutex_);
  sizes_[capacity_for(bytes)].reserved += size_t(count);
}

void Slots::release(size_t bytes, int count) {
  std::lock_guard const lock(mutex_);
  sizes_[capacity_for(bytes)].reserved -= size_t(count);
}

Mirror::Mirror(Slots& slots, Allocate allocate, size_t bytes)
    : slots_(slots), allocate_(std::move(allocate)), host_(bytes) {
  slots_.reserve(bytes, kSpares);
}

Mirror::~Mirror() { slots_.release(host_.size(), kSpares); }

void* Mirror::upload(Stream stream) {
  if (host_.empty()) {
    return nullptr;
  }
  if (slots_.device().is_capturing(stream)) {
    return upload_captured(stream);
  }
  if (host_ == uploaded_) {
    return buffer_.get();
  }
  if (!buffer_) {
    buffer_ = allocate_(host_.size());
  }
  uploaded_.clear();  // unknown until the copy is queued
  Slot const slot = slots_.take(host_.size());
  std::memcpy(slot.memory, host_.data(), host_.size());
  slots_.device().copy(buffer_.get(), slot.memory, host_.size(), stream);
  slots_.device().record(slot.event, stream);
  slots_.give_back(slot, host_.size());
  uploaded_ = host_;
  return buffer_.get();
}

// The copy is captured again even where the content was captured before: this graph may be replayed first.
void* Mirror::upload_captured(Stream stream) {
  auto const same = [&](Captured const& c) { return !std::memcmp(c.slot.memory, host_.data(), host_.size()); };
  auto found = std::find_if(captured_.begin(), captured_.end(), same);
  if (found == captured_.end()) {
    Buffer buffer = allocate_(host_.size());
    Slot const slot = slots_.take_for_capture(host_.size());
    std::memcpy(slot.memory, host_.data(), host_.size());
    found = captured_.insert(captured_.end(), {slot, std::move(buffer)});
  }
  slots_.device().copy(found->buffer.get(), found->slot.memory, host_.size(), stream);
  return found->buffer.get();
}

}  // namespace amp_engine::cuda
