// Device copies of host tables, uploaded when the host's bytes changed and never waited for.
//
// Decisions only: what CUDA does is behind `Device`, of which the tests have a fake.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

struct CUstream_st;  // cudaStream_t and cudaEvent_t without CUDA's headers
struct CUevent_st;

namespace amp_engine::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;

// Pinned host memory, and the event behind the last copy out of it.
struct Slot {
  void* memory = nullptr;
  Event event = nullptr;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual bool is_capturing(Stream stream) = 0;
  virtual Slot make_slot(size_t bytes) = 0;  // is asked for during a capture too
  virtual void copy(void* to, void const* from, size_t bytes, Stream stream) = 0;  // host to device, asynchronous
  virtual void record(Event event, Stream stream) = 0;
  virtual bool is_done(Event event) = 0;  // not asked for during a capture, which it would break
};

// The pinned memory of one device, by powers of two. It is never given back: freeing it could wait for the device.
// A slot is used again once its copy is done; where none of the oldest few is, there is another slot: copies of one stream
// end in order, but one that waits must not hold up those of others. In steady use there are as many as steps that the
// host runs ahead. Safe from several threads.
class Slots {
 public:
  explicit Slots(Device& device) : device_(device) {}
  Device& device() const { return device_; }

  Slot take(size_t bytes);                 // outside of captures; give it back once the copy is queued
  void give_back(Slot slot, size_t bytes);
  Slot take_for_capture(size_t bytes);     // one whose copies are done; not to be given back while a graph reads it

  // As many slots of that size are kept ready for captures.
  void reserve(size_t bytes, int count);
  void release(size_t bytes, int count);

 private:
  struct Size {
    std::deque<Slot> used;    // oldest first
    std::vector<Slot> spare;  // of finished copies
    size_t reserved = 0;
  };

  Device& device_;
  std::mutex mutex_;
  std::map<size_t, Size> sizes_;  // by capacity
};

// Memory of the device, its owner's own way of freeing it included. Must allow work queued on the current stream to
// finish with it, and, if made during a capture, must last as long as the graph. PyTorch's allocator does both.
using Buffer = std::shared_ptr<void>;
using Allocate = std::function<Buffer(size_t bytes)>;

// The copy on the device of a table of fixed size.
//
//   kernel<<<..., stream>>>(mirror.upload(table, stream));
//
// In a capture each content gets a slot and a buffer of its own that are never written again: the copy is part of the
// graph and reads the slot at every replay. So a replay can neither see the tables of later eager steps nor overwrite
// them. Those slots outlive the mirror, since nothing tells when the last graph is gone.
class Mirror {
 public:
  Mirror(Slots& slots, Allocate allocate, size_t bytes);
  ~Mirror();
  Mirror(Mirror const&) = delete;
  Mirror& operator=(Mirror const&) = delete;

  size_t size() const { return bytes_; }

  // Address on the device of what `table`, of `size()` bytes, is now, in order of `stream`; null if there are none. It
  // holds for work queued on the stream before the next upload. The table may be written as soon as this returns.
  void* upload(void const* table, Stream stream);

 private:
  struct Captured {
    Slot slot;
    Buffer buffer;
  };

  void* upload_captured(void const* table, Stream stream);

  Slots& slots_;
  Allocate allocate_;
  size_t bytes_;
  std::vector<std::byte> uploaded_;  // what `buffer_` holds; empty where that is not known
  Buffer buffer_;
  std::vector<Captured> captured_;
};

}  // namespace amp_engine::cuda
