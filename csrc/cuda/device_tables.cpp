// ops.cpp's way to a GPU: uploads the tables that changed and queues the kernels on PyTorch's current stream.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>

#include "cuda/backend.h"
#include "cuda/device.h"
#include "ops.h"

namespace amp_engine {

struct TablesOfOne {
  std::unique_ptr<cuda::Mirror> rows, entries, chunks, groups, lamb_steps;
};

// Of every device that was computed on: a mirror belongs to one.
struct DeviceTables {
  std::map<at::DeviceIndex, TablesOfOne> of;
};

bool has_cuda() { return true; }

namespace {

// The bytes of `table` on the device.
template <class T>
T const* upload(std::unique_ptr<cuda::Mirror>& mirror, std::vector<T> const& table, at::Device device,
                cudaStream_t stream) {
  size_t const bytes = table.size() * sizeof(T);
  if (bytes == 0) {
    return nullptr;
  }
  if (!mirror || mirror->size() != bytes) {
    auto const allocate = [device](size_t n) {
      auto const tensor = std::make_shared<at::Tensor>(
          at::empty({int64_t(n)}, at::TensorOptions().dtype(at::kByte).device(device)));
      return cuda::Buffer(tensor, tensor->mutable_data_ptr());
    };
    mirror = std::make_unique<cuda::Mirror>(cuda::slots(device.index()), allocate, bytes);
  }
  return static_cast<T const*>(mirror->upload(table.data(), stream));
}

TablesOfOne& existing(std::shared_ptr<DeviceTables>& tables, at::Device device) {
  if (!tables) {
    tables = std::make_shared<DeviceTables>();
  }
  return tables->of[device.index()];
}

}  // namespace

void run_on_device(CheckArgs& args, std::vector<ListRow> const& rows, Chunking const& chunking,
                   std::shared_ptr<DeviceTables>& tables, bool is_axpby, at::Device device) {
  c10::DeviceGuard const guard(device);
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index());
  TablesOfOne& t = existing(tables, device);
  args.rows = upload(t.rows, rows, device, stream);
  args.chunks = upload(t.chunks, chunking.chunks, device, stream);
  is_axpby ? cuda::axpby(args, stream) : cuda::check(args, stream);
}

void step_on_device(StepArgs& args, std::vector<Row> const& rows, std::vector<Entry> const& gradients,
                    std::vector<Group> const& groups, std::vector<float*> const& lamb_steps, Chunking const& chunking,
                    std::shared_ptr<DeviceTables>& tables, at::Device device) {
  c10::DeviceGuard const guard(device);
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index());
  TablesOfOne& t = existing(tables, device);
  args.rows = upload(t.rows, rows, device, stream);
  args.gradients = upload(t.entries, gradients, device, stream);
  args.chunks = upload(t.chunks, chunking.chunks, device, stream);
  args.groups = upload(t.groups, groups, device, stream);
  args.lamb_steps = upload(t.lamb_steps, lamb_steps, device, stream);
  cuda::step(args, stream);
}

void update_scale_on_device(ScaleState const& state, ScaleRule const& rule, at::Device device) {
  c10::DeviceGuard const guard(device);
  cuda::update_scale(state, rule, c10::cuda::getCurrentCUDAStream(device.index()));
}

}  // namespace amp_engine
