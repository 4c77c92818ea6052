// Connects ops.cpp to a GPU: uploads the tables that have changed and queues the kernels on PyTorch's current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "cuda/backend.h"
#include "cuda/error.h"
#include "cuda/tables.h"
#include "ops.h"

namespace amp_engine {
namespace {

// Allocates for the current stream of the device only: freed memory may be reused on that stream at once.
cuda::Buffer allocate(int device, size_t bytes) {
  auto const options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA, c10::DeviceIndex(device));
  auto const tensor = std::make_shared<at::Tensor>(at::empty({int64_t(bytes)}, options));
  return cuda::Buffer(tensor, tensor->mutable_data_ptr());
}

}  // namespace

struct DeviceTables : cuda::TablesByDevice {
  DeviceTables() : TablesByDevice(allocate) {}
};

bool has_cuda() { return true; }

namespace {

cuda::Tables& tables_on(std::shared_ptr<DeviceTables>& tables, at::Device device) {
  if (!tables) {
    tables = std::make_shared<DeviceTables>();
  }
  return tables->on(device.index());
}

}  // namespace

void run_on_device(CheckArgs& args, CheckLists const& lists, Chunking const& chunking,
                   std::shared_ptr<DeviceTables>& tables, at::Device device) {
  c10::DeviceGuard const guard(device);
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index());
  cuda::Tables& t = tables_on(tables, device);
  cuda::upload(t, args, lists, chunking, stream);
  cuda::Buffer partials;
  if (args.checked) {
    partials = t.scratch(size_t(args.n_chunks + 1) * sizeof(Partial), stream);
    args.partials = static_cast<Partial*>(partials.get());
  }
  cuda::check(args, stream);
}

void step_on_device(StepArgs& args, StepLists const& lists, std::vector<Group> const& groups, Chunking const& chunking,
                    std::shared_ptr<DeviceTables>& tables, at::Device device) {
  c10::DeviceGuard const guard(device);
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index());
  cuda::Tables& t = tables_on(tables, device);
  cuda::upload(t, args, lists, groups, chunking, stream);
  std::vector<int64_t> lamb;
  if (args.formula == Formula::lamb) {
    lamb = lamb_offsets(lists.rows);
  }
  cuda::StepScratch const places(args.n_tensors, args.n_chunks, lamb.empty() ? 0 : lamb.back());
  cuda::Buffer const scratch = t.scratch(places.end, stream);
  char* const begin = static_cast<char*>(scratch.get());
  args.coefficients = begin;
  if (!lamb.empty()) {
    args.partials = reinterpret_cast<Partial*>(begin + places.partials);
    lamb.pop_back();
    std::vector<float*> steps;
    for (int64_t const offset : lamb) {
      steps.push_back(reinterpret_cast<float*>(begin + places.lamb_steps) + offset);
    }
    args.lamb_steps = t.upload(cuda::TableOf::lamb_steps, steps, stream);
  }
  cuda::step(args, stream);
}

void update_scale_on_device(ScaleUpdate const& update, at::Device device) {
  c10::DeviceGuard const guard(device);
  cuda::update_scale(update, c10::cuda::getCurrentCUDAStream(device.index()));
}

bool is_captured(at::Device device) {
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (stream) {  // the default stream is never captured
    AMP_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace amp_engine
