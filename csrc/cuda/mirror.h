// Device copies of host tables, uploaded when the host's bytes changed and never waited for.
//
// Decisions only: what CUDA does is behind `Device`, of which the tests have a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
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
  virtual uint64_t capture(Stream stream) = 0;  // which one the stream is in, of all that ever were; 0: none
  // `release` is called once, by any thread, when the graph of the stream's capture is gone and nothing can run it any
  // more; never if this throws. It must not call CUDA.
  virtual void when_graph_is_gone(Stream stream, std::function<void()> release) = 0;
  virtual Slot make_slot(size_t bytes) = 0;  // is asked for during a capture too
  virtual void copy(void* to, void const* from, size_t bytes, Stream stream) = 0;  // host to device, asynchronous
  virtual void record(Event event, Stream stream) = 0;
  virtual bool is_done(Event event) = 0;  // not asked for during a capture, which it would break
};

// The pinned memory of one device, by powers of two. It is never freed, which could wait for the device.
// A slot is used again once its copy is done; where none of the oldest few is, there is another slot: copies of one stream
// end in order, but one that waits must not hold up those of others. In steady use there are as many as steps that the
// host runs ahead. Safe from several threads.
class Slots {
 public:
  explicit Slots(Device& device) : device_(device) {}
  Device& device() const { return device_; }

  Slot take(size_t bytes);                 // outside of captures; give it back once the copy is queued
  void give_back(Slot slot, size_t bytes);

  // One whose copies are done. It is given back by itself when the graph that `stream` is captured in is gone.
  Slot take_for_capture(size_t bytes, Stream stream);

  // As many slots of that size are kept ready for captures.
  void reserve(size_t bytes, int count);
  void release(size_t bytes, int count);

 private:
  struct Size {
    std::deque<Slot> used;    // oldest first
    std::vector<Slot> spare;  // of finished copies
    size_t reserved = 0;
  };

  void take_back_returned();

  Device& device_;
  std::mutex mutex_;
  std::map<size_t, Size> sizes_;  // by capacity
  // What graphs gave back, behind a lock that is never held around a call of CUDA, which may wait for who gives back.
  std::mutex returned_mutex_;
  std::vector<std::pair<size_t, Slot>> returned_;
};

// Memory of the device, its owner's own way of freeing it included. Must allow work queued on the stream that was current
// when it was made to finish with it, and, if made during a capture, must last as long as the graph. PyTorch's allocator
// does both.
using Buffer = std::shared_ptr<void>;
using Allocate = std::function<Buffer(size_t bytes)>;

// The copy on the device of a table of fixed size.
//
//   kernel<<<..., stream>>>(mirror.upload(table, stream));
//
// In a capture each content gets a slot and a buffer of its own that are never written again: the copy is part of the
// graph and reads the slot at every replay. So a replay can neither see the tables of later eager steps nor overwrite
// them. Slot and buffer are the graph's, which may outlive the mirror, and be outlived by it.
class Mirror {
 public:
  Mirror(Slots& slots, Allocate allocate, size_t bytes);
  ~Mirror();
  Mirror(Mirror const&) = delete;
  Mirror& operator=(Mirror const&) = delete;

  size_t size() const { return bytes_; }

  // Address on the device of what `table`, of `size()` bytes, is now, in order of `stream`; null if there are none. It
  // holds for work queued on the stream before the next upload. The table may be written as soon as this returns.
  // Tables of one version are taken for equal without a look; those of version 0 are compared.
  void* upload(void const* table, Stream stream, uint64_t version = 0);

 private:
  struct Captured {
    Slot slot;
    Buffer buffer;
    uint64_t version;
  };

  bool is_uploaded(void const* table, uint64_t version) const;
  void* upload_captured(void const* table, Stream stream, uint64_t version);

  Slots& slots_;
  Allocate allocate_;
  size_t bytes_;
  // What `buffer_` holds: a version, or these bytes, or what is not known.
  uint64_t version_ = 0;
  std::vector<std::byte> uploaded_;
  Buffer buffer_;
  Stream stream_ = nullptr;         // that `buffer_` was made for
  uint64_t capture_ = 0;            // the last one
  std::vector<Captured> captured_;  // in it
};

}  // namespace amp_engine::cuda
