#include "cuda/mirror.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace amp_engine::cuda {
namespace {

constexpr size_t kSmallestSlot = 4096;
constexpr size_t kAsked = 8;  // slots that `take` looks at; each takes about a microsecond

size_t capacity_for(size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallestSlot)); }

}  // namespace

Slot Slots::take(size_t bytes) {
  size_t const capacity = capacity_for(bytes);
  std::lock_guard const lock(mutex_);
  take_back_returned();
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
  if (size.spare.size() > size.reserved) {
    Slot const slot = size.spare.back();
    size.spare.pop_back();
    return slot;
  }
  return device_.make_slot(capacity);
}

void Slots::give_back(Slot slot, size_t bytes) {
  std::lock_guard const lock(mutex_);
  sizes_[capacity_for(bytes)].used.push_back(slot);
}

Slot Slots::take_for_capture(size_t bytes, Stream stream) {
  size_t const capacity = capacity_for(bytes);
  Slot slot;
  {
    std::lock_guard const lock(mutex_);
    take_back_returned();
    std::vector<Slot>& spare = sizes_[capacity].spare;
    if (spare.empty()) {
      spare.push_back(device_.make_slot(capacity));
    }
    slot = spare.back();
    spare.pop_back();
  }
  auto const take_back = [this, slot, capacity] {
    std::lock_guard const lock(returned_mutex_);
    returned_.emplace_back(capacity, slot);
  };
  try {
    device_.when_graph_is_gone(stream, take_back);
  } catch (...) {
    take_back();
    throw;
  }
  return slot;
}

void Slots::take_back_returned() {
  std::lock_guard const lock(returned_mutex_);
  for (auto const& [capacity, slot] : returned_) {
    sizes_[capacity].spare.push_back(slot);
  }
  returned_.clear();
}

void Slots::reserve(size_t bytes) {
  std::lock_guard const lock(mutex_);
  ++sizes_[capacity_for(bytes)].reserved;
}

void Slots::release(size_t bytes) {
  std::lock_guard const lock(mutex_);
  --sizes_[capacity_for(bytes)].reserved;
}

Mirror::Mirror(Slots& slots, Allocate allocate, size_t bytes)
    : slots_(slots), allocate_(std::move(allocate)), bytes_(bytes) {
  slots_.reserve(bytes);
}

Mirror::~Mirror() { slots_.release(bytes_); }

bool Mirror::is_uploaded(void const* table, uint64_t version) const {
  return version ? version_ == version : !uploaded_.empty() && !std::memcmp(uploaded_.data(), table, bytes_);
}

void* Mirror::upload(void const* table, Stream stream, uint64_t version) {
  if (uint64_t const capture = slots_.device().capture(stream)) {
    if (capture_ != capture) {
      captured_.clear();
      capture_ = capture;
    }
    return upload_captured(table, stream, version);
  }
  if (buffer_ && stream_ == stream && is_uploaded(table, version)) {
    return buffer_.get();
  }
  // Unknown until the copy is queued.
  version_ = 0;
  uploaded_.clear();
  if (!buffer_ || stream_ != stream) {
    // Work of the other stream may not have read the buffer yet, but freed memory is only reused on its own stream.
    buffer_.reset();
    buffer_ = allocate_(bytes_);
    stream_ = stream;
  }
  Slot const slot = slots_.take(bytes_);
  std::memcpy(slot.memory, table, bytes_);
  slots_.device().copy(buffer_.get(), slot.memory, bytes_, stream);
  slots_.device().record(slot.event, stream);
  slots_.give_back(slot, bytes_);
  version_ = version;
  if (!version) {
    auto const* const begin = static_cast<std::byte const*>(table);
    uploaded_.assign(begin, begin + bytes_);
  }
  return buffer_.get();
}

// Captures the copy again even if this capture has one, because another stream of the capture may run first.
void* Mirror::upload_captured(void const* table, Stream stream, uint64_t version) {
  auto const same = [&](Captured const& c) {
    return c.version == version && (version || !std::memcmp(c.slot.memory, table, bytes_));
  };
  auto found = std::find_if(captured_.begin(), captured_.end(), same);
  if (found == captured_.end()) {
    Buffer buffer = allocate_(bytes_);
    Slot const slot = slots_.take_for_capture(bytes_, stream);
    std::memcpy(slot.memory, table, bytes_);
    found = captured_.insert(captured_.end(), {slot, std::move(buffer), version});
  }
  slots_.device().copy(found->buffer.get(), found->slot.memory, bytes_, stream);
  return found->buffer.get();
}

}  // namespace amp_engine::cuda
