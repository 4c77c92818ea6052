#include "cuda/mirror.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace amp_engine::cuda {
namespace {

constexpr size_t kSmallestSlot = 4096;
constexpr int kSpares = 1;  // per mirror
constexpr size_t kAsked = 8;  // slots, each of which takes about a microsecond

size_t capacity_for(size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallestSlot)); }

}  // namespace

Slot Slots::take(size_t bytes) {
  size_t const capacity = capacity_for(bytes);
  std::lock_guard const lock(mutex_);
  Size& size = sizes_[capacity];
  while (size.spare.size() < size.reserved) {
    size.spare.push_back(device_.make_slot(capacity));
  }
  for (size_t i = 0; i < std::min(size.used.size(), kAsked); ++i) {
    if (device_.is_done(size.used[i].event)) {
      Slot const slot = size.used[i];
      size.used.erase(size.used.begin() + std::ptrdiff_t(i));
      return slot;
    }
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
    : slots_(slots), allocate_(std::move(allocate)), bytes_(bytes) {
  slots_.reserve(bytes, kSpares);
}

Mirror::~Mirror() { slots_.release(bytes_, kSpares); }

void* Mirror::upload(void const* table, Stream stream) {
  if (bytes_ == 0) {
    return nullptr;
  }
  if (slots_.device().is_capturing(stream)) {
    return upload_captured(table, stream);
  }
  if (!uploaded_.empty() && !std::memcmp(uploaded_.data(), table, bytes_)) {
    return buffer_.get();
  }
  if (!buffer_) {
    buffer_ = allocate_(bytes_);
  }
  uploaded_.clear();  // unknown until the copy is queued
  Slot const slot = slots_.take(bytes_);
  std::memcpy(slot.memory, table, bytes_);
  slots_.device().copy(buffer_.get(), slot.memory, bytes_, stream);
  slots_.device().record(slot.event, stream);
  slots_.give_back(slot, bytes_);
  auto const* const begin = static_cast<std::byte const*>(table);
  uploaded_.assign(begin, begin + bytes_);
  return buffer_.get();
}

// The copy is captured again even where the content was captured before: this graph may be replayed first.
void* Mirror::upload_captured(void const* table, Stream stream) {
  auto const same = [&](Captured const& c) { return !std::memcmp(c.slot.memory, table, bytes_); };
  auto found = std::find_if(captured_.begin(), captured_.end(), same);
  if (found == captured_.end()) {
    Buffer buffer = allocate_(bytes_);
    Slot const slot = slots_.take_for_capture(bytes_);
    std::memcpy(slot.memory, table, bytes_);
    found = captured_.insert(captured_.end(), {slot, std::move(buffer)});
  }
  slots_.device().copy(found->buffer.get(), found->slot.memory, bytes_, stream);
  return found->buffer.get();
}

}  // namespace amp_engine::cuda
