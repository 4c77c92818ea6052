#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>

#include "cuda/error.h"

namespace amp_engine::cuda {
namespace {

// Lets this thread allocate while it or another thread is capturing a stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { AMP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(RelaxedCapture const&) = delete;
  RelaxedCapture& operator=(RelaxedCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Captured {
  uint64_t id = 0;  // unique in the process; 0: no capture
  cudaGraph_t graph = nullptr;
};

Captured captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  Captured result;
  AMP_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id, &result.graph));
  if (status == cudaStreamCaptureStatusInvalidated) {
    AMP_CUDA_CHECK(cudaErrorStreamCaptureInvalidated);
  }
  result.id = status == cudaStreamCaptureStatusNone ? 0 : id + 1;
  return result;
}

class CudaDevice final : public Device {
 public:
  uint64_t capture(Stream stream) override { return captured(stream).id; }

  void when_graph_is_gone(Stream stream, std::function<void()> release) override {
    cudaGraph_t const graph = captured(stream).graph;
    auto owned = std::make_unique<std::function<void()>>(std::move(release));
    auto const call = [](void* p) {
      std::unique_ptr<std::function<void()>> const called(static_cast<std::function<void()>*>(p));
      (*called)();
    };
    cudaUserObject_t object = nullptr;
    AMP_CUDA_CHECK(cudaUserObjectCreate(&object, owned.get(), call, 1, cudaUserObjectNoDestructorSync));
    std::function<void()>& release_later = *owned.release();
    // The graph takes the reference over. Each executable graph that is instantiated from it gets another reference.
    cudaError_t const error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (error != cudaSuccess) {
      release_later = [] {};
      cudaUserObjectRelease(object, 1);
    }
    AMP_CUDA_CHECK(error);
  }

  Slot make_slot(size_t bytes) override {
    RelaxedCapture const relaxed;
    Slot slot;
    AMP_CUDA_CHECK(cudaHostAlloc(&slot.memory, bytes, cudaHostAllocDefault));
    AMP_CUDA_CHECK(cudaEventCreateWithFlags(&slot.event, cudaEventDisableTiming));
    return slot;
  }

  void copy(void* to, void const* from, size_t bytes, Stream stream) override {
    AMP_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
  }

  void record(Event event, Stream stream) override { AMP_CUDA_CHECK(cudaEventRecord(event, stream)); }

  // In relaxed mode, because another thread may be capturing.
  bool is_done(Event event) override {
    RelaxedCapture const relaxed;
    cudaError_t const error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // clears it: it is not an error
      return false;
    }
    AMP_CUDA_CHECK(error);
    return true;
  }
};

struct PerDevice {
  CudaDevice device;
  Slots slots{device};
};

}  // namespace

Slots& slots(int device) {
  static std::mutex mutex;
  static auto& entries = *new std::map<int, PerDevice>;  // never destroyed: CUDA may be gone by then
  std::lock_guard const lock(mutex);
  return entries[device].slots;
}

}  // namespace amp_engine::cuda
