// Device copies of host tables. A table is uploaded when its bytes have changed. The host never waits for it.
//
// The code here decides what to do. `Device` has the calls of CUDA, and the tests replace it by a fake.
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

// Pinned host memory, and an event that is recorded after the last copy from it.
struct Slot {
  void* memory = nullptr;
  Event event = nullptr;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual uint64_t capture(Stream stream) = 0;  // id of the stream's capture, unique in the process; 0: none
  // Calls `release` once, on any thread, when the graph of the stream's capture is gone and nothing can run it any
  // more. If this throws, `release` is never called. `release` must not call CUDA.
  virtual void when_graph_is_gone(Stream stream, std::function<void()> release) = 0;
  virtual Slot make_slot(size_t bytes) = 0;  // also called during a capture
  virtual void copy(void* to, void const* from, size_t bytes, Stream stream) = 0;  // host to device, asynchronous
  virtual void record(Event event, Stream stream) = 0;
  virtual bool is_done(Event event) = 0;  // not called during a capture, which it would break
};

// The pinned memory of one device, in sizes of powers of two. It is never freed, because that could wait for the
// device. `take` reuses a slot when its copy is done. It looks at the oldest few used slots; if no copy is done, it
// makes another slot. Copies of one stream finish in order, but a stream that waits must not hold up the copies of
// other streams. In steady use there are as many slots as steps that the host runs ahead. Thread-safe.
class Slots {
 public:
  explicit Slots(Device& device) : device_(device) {}
  Device& device() const { return device_; }

  Slot take(size_t bytes);                 // not during a capture; call give_back after the copy is queued
  void give_back(Slot slot, size_t bytes);

  // A slot whose copies are done. It returns by itself when the graph that `stream` is being captured into is gone.
  Slot take_for_capture(size_t bytes, Stream stream);

  // `reserve` keeps one more slot of this size ready for captures; `release` keeps one fewer.
  void reserve(size_t bytes);
  void release(size_t bytes);

 private:
  struct Size {
    std::deque<Slot> used;    // oldest first
    std::vector<Slot> spare;  // their copies are done
    size_t reserved = 0;
  };

  void take_back_returned();

  Device& device_;
  std::mutex mutex_;
  std::map<size_t, Size> sizes_;  // by capacity
  // Slots that graphs returned. No CUDA call is made under this lock: CUDA may wait for the thread that returns a slot.
  std::mutex returned_mutex_;
  std::vector<std::pair<size_t, Slot>> returned_;
};

// Device memory with its own deleter. The deleter must let work finish that is queued on the stream that was current at
// the allocation. If the memory was allocated during a capture, it must last as long as the graph. PyTorch's allocator
// does both.
using Buffer = std::shared_ptr<void>;
using Allocate = std::function<Buffer(size_t bytes)>;

// The device copy of a table of fixed size, which is not 0.
//
//   kernel<<<..., stream>>>(mirror.upload(table, stream));
//
// In a capture each content gets a slot and a buffer of its own, which are never written again: the copy is part of the
// graph and reads the slot at every replay. So a replay neither sees the tables of later eager steps nor overwrites
// them. The graph owns the slot and the buffer. The graph may outlive the mirror, and the mirror may outlive the graph.
class Mirror {
 public:
  Mirror(Slots& slots, Allocate allocate, size_t bytes);
  ~Mirror();
  Mirror(Mirror const&) = delete;
  Mirror& operator=(Mirror const&) = delete;

  size_t size() const { return bytes_; }

  // Returns the device address of the present content of `table`, which has `size()` bytes, in order of `stream`. The
  // address is valid for work that is queued on the stream before the next upload. The caller may write the table as
  // soon as this returns. Tables of the same version are taken for equal without a comparison. Tables of version 0 are
  // compared.
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
  // The content of `buffer_`: the table of this version, or these bytes. Unknown without either.
  uint64_t version_ = 0;
  std::vector<std::byte> uploaded_;
  Buffer buffer_;
  Stream stream_ = nullptr;         // the stream that `buffer_` was allocated for
  uint64_t capture_ = 0;            // id of the last capture
  std::vector<Captured> captured_;  // uploaded in the last capture
};

}  // namespace amp_engine::cuda
