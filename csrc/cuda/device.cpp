#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda/error.h"

namespace amp_engine::cuda {
namespace {

// Lets this thread allocate while a stream is being captured, by this thread or by another one.
class RelaxedCapture {
 public:
  RelaxedCapture() { AMP_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(RelaxedCapture const&) = delete;
  RelaxedCapture& operator=(RelaxedCapture const&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaDevice final : public Device {
 public:
  bool is_capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    AMP_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
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

  // Relaxed, since another thread may be capturing.
  bool is_done(Event event) override {
    RelaxedCapture const relaxed;
    cudaError_t const error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // not an error; forgets it
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
  static auto& entries = *new std::map<int, PerDevice>;  // not destroyed: CUDA may be gone by then
  std::lock_guard const lock(mutex);
  return entries[device].slots;
}

}  // namespace amp_engine::cuda
