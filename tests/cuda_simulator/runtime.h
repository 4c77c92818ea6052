// CUDA's runtime for tests of csrc/cuda on machines without it: devices, streams, events, captures. What is queued is
// done when a test says so. What CUDA answers with an error is answered so, and ends a capture where it does there; what
// it leaves undefined throws Undefined:
//   - work that touches memory which was freed, or pinned memory that was written since it was queued
//   - work of two streams in the same memory, one of which writes, as nothing orders streams here
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
constexpr unsigned cudaHostAllocDefault = 0, cudaEventDisableTiming = 2;
constexpr unsigned cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;

struct CUgraph_st;
struct CUuserObject_st {
  void* argument;
  void (*destroy)(void*);
};
struct CUevent_st {
  int device;
  int unfinished = 0;
};
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = CUevent_st*;
using cudaGraph_t = CUgraph_st*;
using cudaUserObject_t = CUuserObject_st*;

namespace simulator {

struct Undefined : std::logic_error {
  using std::logic_error::logic_error;
};

constexpr int kHost = -1;

struct Memory {
  std::unique_ptr<char[]> bytes;
  size_t size;
  int device;
  uint64_t of_graph;  // made during its capture; 0: outside of any
  bool is_freed = false;
};

struct Access {
  void const* begin;
  size_t size;
  bool writes;
};

struct Work {
  std::vector<Access> accesses;
  std::function<void()> run;
  std::string pinned = {};  // what the first access has to find
};

inline int current_device = 0;
inline int pinned_pieces = 0;
inline size_t uploaded_bytes = 0;
inline uint64_t graphs = 0;
inline cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
inline std::map<char const*, Memory> memory;  // by address; what was freed stays, so that no address comes twice
inline std::vector<cudaStream_t> streams;

}  // namespace simulator

struct CUgraph_st {
  uint64_t id;
  bool is_valid = true;
  std::vector<simulator::Work> work = {};
  std::vector<cudaUserObject_t> objects = {};

  explicit CUgraph_st(uint64_t id) : id(id) {}
  CUgraph_st(CUgraph_st const&) = delete;
  ~CUgraph_st();
};

struct CUstream_st {
  int device;
  std::deque<simulator::Work> queue = {};
  std::unique_ptr<CUgraph_st> graph = {};  // that is being captured
};

// The graph and whatever runs it are gone: with it the memory made in its capture, unless somebody has it still.
inline CUgraph_st::~CUgraph_st() {
  for (cudaUserObject_t const object : objects) {
    object->destroy(object->argument);
    delete object;
  }
}

namespace simulator {

inline Memory& memory_of(void const* p) {
  auto found = memory.upper_bound(static_cast<char const*>(p));
  if (found == memory.begin() || static_cast<char const*>(p) >= (--found)->first + found->second.size) {
    throw Undefined("memory that CUDA does not know");
  }
  return found->second;
}

inline void* allocate_on(int device, size_t bytes, uint64_t graph) {
  auto block = std::make_unique<char[]>(bytes);
  char* const p = block.get();
  memory.emplace(p, Memory{std::move(block), bytes, device, graph});
  return p;
}

inline CUgraph_st* capturing() {
  for (cudaStream_t const stream : streams) {
    if (stream->graph) {
      return stream->graph.get();
    }
  }
  return nullptr;
}

// What is not allowed while anybody captures, unless the thread says that it knows.
inline cudaError_t unsafe_call() {
  CUgraph_st* const graph = capturing();
  if (!graph || thread_mode == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  graph->is_valid = false;
  return cudaErrorStreamCaptureUnsupported;
}

inline bool overlap(Access const& a, Access const& b) {
  auto const* const x = static_cast<char const*>(a.begin);
  auto const* const y = static_cast<char const*>(b.begin);
  return x < y + b.size && y < x + a.size;
}

inline void queue(cudaStream_t stream, Work work) {
  for (Access const& access : work.accesses) {
    Memory const& touched = memory_of(access.begin);
    if (touched.device != kHost && touched.device != stream->device) {
      throw Undefined("a kernel in the memory of another device");
    }
  }
  if (stream->graph) {
    stream->graph->work.push_back(std::move(work));
    return;
  }
  for (cudaStream_t const other : streams) {
    for (Work const& queued : other == stream ? std::deque<Work>{} : other->queue) {
      for (Access const& a : queued.accesses) {
        for (Access const& b : work.accesses) {
          if (overlap(a, b) && (a.writes || b.writes)) {
            throw Undefined("two streams in the same memory");
          }
        }
      }
    }
  }
  stream->queue.push_back(std::move(work));
}

inline cudaStream_t make_stream() {
  streams.push_back(new CUstream_st{current_device});
  return streams.back();
}

// Memory as PyTorch's allocator gives it: what is freed may be used at once by its own stream, so that work of others
// that is queued for it is lost; what is made in a capture is the graph's.
inline std::shared_ptr<void> allocate(cudaStream_t stream, size_t bytes) {
  CUgraph_st const* const graph = stream->graph.get();
  void* const p = allocate_on(stream->device, bytes, graph ? graph->id : 0);
  return {p, [stream](void* freed) {
            Memory& block = memory_of(freed);
            for (cudaStream_t const other : streams) {
              for (Work const& queued : other == stream ? std::deque<Work>{} : other->queue) {
                for (Access const& access : queued.accesses) {
                  if (overlap(access, {freed, block.size, true})) {
                    std::fprintf(stderr, "simulator: memory was freed that another stream is going to use\n");
                    std::abort();  // this may be a destructor
                  }
                }
              }
            }
            block.is_freed = true;
          }};
}

// A kernel that reads memory; what it saw stands in `seen` when it is done.
inline void queue_read(cudaStream_t stream, void const* from, size_t bytes, std::string* seen) {
  queue(stream, {{{from, bytes, false}}, [=] { seen->assign(static_cast<char const*>(from), bytes); }});
}

// A kernel that writes memory.
inline void queue_write(cudaStream_t stream, void* to, size_t bytes, char letter) {
  queue(stream, {{{to, bytes, true}}, [=] { std::memset(to, letter, bytes); }});
}

// Memory made in a capture lasts as long as its graph, freed or not, and in it work of the graph alone is in order. Other
// memory that was freed is lost to a graph, whose replay comes later; to a stream it was still its own.
inline void run(Work const& work, uint64_t graph) {
  for (Access const& access : work.accesses) {
    Memory const& touched = memory_of(access.begin);
    if (graph && touched.is_freed && touched.of_graph != graph) {
      throw Undefined("a replay in memory that was freed");
    }
    if (graph && touched.device != kHost && touched.of_graph && touched.of_graph != graph) {
      throw Undefined("a replay in memory of another graph");
    }
  }
  if (!work.pinned.empty() && std::memcmp(work.accesses[0].begin, work.pinned.data(), work.pinned.size())) {
    throw Undefined("pinned memory was written before its copy was done");
  }
  work.run();
}

inline void synchronize(cudaStream_t stream) {
  while (!stream->queue.empty()) {
    run(stream->queue.front(), 0);
    stream->queue.pop_front();
  }
}

// One at a time, as PyTorch has it.
inline void begin_capture(cudaStream_t stream) { stream->graph.reset(new CUgraph_st(++graphs)); }

// Null if something ended it.
inline std::unique_ptr<CUgraph_st> end_capture(cudaStream_t stream) {
  std::unique_ptr<CUgraph_st> graph = std::move(stream->graph);
  return graph->is_valid ? std::move(graph) : nullptr;
}

// Done at once.
inline void replay(CUgraph_st const& graph) {
  for (Work const& work : graph.work) {
    run(work, graph.id);
  }
}

}  // namespace simulator

inline char const* cudaGetErrorName(cudaError_t) { return "error"; }
inline char const* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue            ? "invalid value"
         : error == cudaErrorInvalidResourceHandle ? "invalid resource handle"
                                                   : "stream capture";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaSetDevice(int device) {
  simulator::current_device = device;
  return cudaSuccess;
}

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, simulator::thread_mode);
  return cudaSuccess;
}

inline cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  if (cudaError_t const error = simulator::unsafe_call()) {
    return error;
  }
  *p = simulator::allocate_on(simulator::kHost, bytes, 0);
  ++simulator::pinned_pieces;
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{simulator::current_device};
  return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event->device != stream->device) {
    return cudaErrorInvalidResourceHandle;
  }
  ++event->unfinished;
  simulator::queue(stream, {{}, [event] { --event->unfinished; }});
  return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (cudaError_t const error = simulator::unsafe_call()) {
    return error;
  }
  return event->unfinished ? cudaErrorNotReady : cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  using namespace simulator;
  auto const found = memory.find(static_cast<char const*>(from));
  bool const is_pinned = found != memory.end() && found->second.device == kHost;
  if (!is_pinned) {  // the host waits, which nothing of ours may
    if (stream->graph) {
      stream->graph->is_valid = false;
    }
    return stream->graph ? cudaErrorStreamCaptureUnsupported : cudaErrorInvalidValue;
  }
  uploaded_bytes += bytes;
  queue(stream, {{{from, bytes, false}, {to, bytes, true}},
                 [=] { std::memcpy(to, from, bytes); },
                 std::string(static_cast<char const*>(from), bytes)});
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph) {
  CUgraph_st* const captured = stream->graph.get();
  *status = !captured             ? cudaStreamCaptureStatusNone
            : captured->is_valid ? cudaStreamCaptureStatusActive
                                 : cudaStreamCaptureStatusInvalidated;
  if (captured) {
    *id = captured->id;
    *graph = captured;
  }
  return cudaSuccess;
}

inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* argument, void (*destroy)(void*), unsigned,
                                        unsigned) {
  *object = new CUuserObject_st{argument, destroy};
  return cudaSuccess;
}

inline cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  object->destroy(object->argument);
  delete object;
  return cudaSuccess;
}

inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
  if (!graph) {
    return cudaErrorInvalidValue;
  }
  graph->objects.push_back(object);
  return cudaSuccess;
}
