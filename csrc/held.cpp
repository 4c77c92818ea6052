#include "held.h"

#include <ATen/ops/_lazy_clone_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "checks.h"
#include "ops.h"
#include "storage.h"

namespace amp_engine {
namespace {

bool is_on_default_stream(at::Device device) {
  c10::impl::VirtualGuardImpl const guard(device.type());
  return guard.getStream(device) == guard.getDefaultStream(device);
}

#if AMP_HAS_MATERIALIZER
// Without the CUDA kernels a copy is a plain cudaMemcpy, and streams other than the default one do not wait for it.
bool is_copied_in_order(at::Device device) { return device.is_cuda() && has_cuda(); }

// Copies of held storages from before a write. Writers call with and without the GIL, so code that has this lock must
// not call Python, allocate on a GPU, or free memory.
struct Copies {
  std::mutex mutex;
  std::unordered_map<c10::StorageImpl const*, c10::Storage> by_storage;
  std::atomic<bool> are_there = false;

  // Never destroyed, because a writer may call at the end of the process.
  static Copies& all() {
    static Copies& copies = *new Copies;
    return copies;
  }
};

// On a GPU the copy runs in order of the writer's stream, which has to follow the stream that wrote the memory.
c10::DataPtr copied(c10::StorageImpl& storage) {
  if (!is_copied_in_order(storage.device())) {
    return storage.allocator()->clone(storage.data(), storage.nbytes());
  }
  c10::DeviceGuard const guard(storage.device());
  c10::DataPtr copy = storage.allocator()->allocate(storage.nbytes());
  copy_on_device(copy.mutable_get(), storage.data(), storage.nbytes(), storage.device());
  return copy;
}

// If two writers call this at once, both copy before either writes. The first to finish keeps its copy, then writes.
void keep_copy_in_capture(c10::StorageImpl* storage) {
  c10::Storage copy(c10::Storage::use_byte_size_t(), storage->nbytes(), copied(*storage), storage->allocator(), false);
  Copies& copies = Copies::all();
  std::lock_guard const lock(copies.mutex);
  copies.by_storage.try_emplace(storage, std::move(copy));
  copies.are_there = true;
}

// The materializer of gradients that were held outside of a capture. In a capture only replays would make the copy.
void keep_copy(c10::StorageImpl* storage) {
  TORCH_CHECK(!is_copied_in_order(storage->device()) || !is_captured(storage->device()),
              "A gradient that amp holds for the step is written in a capture of a CUDA graph.  Call optimizer.step(), or "
              "optimizer.zero_grad(), before the capture.");
  keep_copy_in_capture(storage);
}

// For memory of another stream. After it is freed, the allocator does not reuse it before the work that is queued on
// the current stream until then is done.
void read_here(c10::Storage const& storage) {
  if (storage.device().is_cuda()) {
    c10::impl::VirtualGuardImpl const guard(at::kCUDA);
    guard.recordDataPtrOnStream(storage.data_ptr(), guard.getStream(storage.device()));
  }
}

c10::Storage copy_of(c10::StorageImpl const& storage) {
  Copies& copies = Copies::all();
  if (!copies.are_there) {
    return {};
  }
  std::lock_guard const lock(copies.mutex);
  auto const found = copies.by_storage.find(&storage);
  return found == copies.by_storage.end() ? c10::Storage() : found->second;
}

// True if the storage was not written since it was armed. Other code may have armed it again after a write, but then
// the write has left a copy.
bool is_unwritten(c10::StorageImpl const& storage) {
  return storage.has_materializer() && !c10::impl::cow::is_cow_data_ptr(storage.data_ptr()) && !copy_of(storage);
}
#endif

bool has_own_memory(at::Tensor const& t) {
  c10::StorageImpl const& storage = storage_of(t);
  bool const is_own = c10::impl::cow::has_simple_data_ptr(storage) || c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
  if (!is_own || storage.allocator() == nullptr || storage.data() == nullptr) {
    return false;
  }
#if AMP_HAS_MATERIALIZER
  if (storage.has_materializer() || copy_of(storage)) {  // armed already, or written since it was held
    return false;
  }
#endif
  return true;
}

#if AMP_HAS_MATERIALIZER
bool may_be_armed(at::Tensor const& t) {
  return has_own_memory(t) && (t.is_cpu() || is_copied_in_order(t.device()) || is_on_default_stream(t.device()));
}
#endif

// On a GPU only on the default stream. torch copies by a plain cudaMemcpy. Other streams do not wait for it, and a
// capture, whose stream is never the default one, forbids it.
bool may_be_cloned_lazily(at::Tensor const& t) {
  return AMP_HAS_LAZY_CLONES && has_own_memory(t) && (t.is_cpu() || is_on_default_stream(t.device()));
}

}  // namespace

at::Tensor copy(at::Tensor const& t) {
  c10::NoGradGuard const no_grad;
  bool const is_cow = c10::impl::cow::is_cow_data_ptr(storage_of(t).data_ptr());
  return (AMP_HAS_LAZY_CLONES && is_cow) || may_be_cloned_lazily(t) ? at::native::_lazy_clone(t) : t.clone();
}

Held::~Held() {
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i + 8 < rows_.size()) {
      __builtin_prefetch(rows_[i + 8].storage.unsafeGetStorageImpl());
    }
    discard(rows_[i]);
  }
}

void Held::discard(Row& row) {
  if (row.is_armed && !row.shared) {
    disarm(row.storage);
  }
  row.storage = c10::Storage();
  row.shared.reset();
  row.is_armed = false;
}

void Held::disarm([[maybe_unused]] c10::Storage const& storage) {
#if AMP_HAS_MATERIALIZER
  c10::StorageImpl& impl = storage_of(storage);
  if (storage.use_count() == 1 && is_unwritten(impl)) {
    return;  // nothing else refers to the storage, so it is freed
  }
  c10::Storage copy;  // destroyed after the unlock
  Copies& copies = Copies::all();
  std::lock_guard const lock(copies.mutex);
  auto const found = copies.by_storage.find(&impl);
  if (found != copies.by_storage.end()) {
    copy = std::move(found->second);
    copies.by_storage.erase(found);
    copies.are_there = !copies.by_storage.empty();
  } else if (impl.has_materializer() && !c10::impl::cow::is_cow_data_ptr(impl.data_ptr())) {
    impl.clear_materializer();
  }
#endif
}

std::shared_ptr<Held> Held::rearranged(std::vector<int64_t> const& rows) {
  auto result = std::make_shared<Held>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= 0) {
      result->rows_[i] = std::exchange(rows_.at(size_t(rows[i])), Row());
    }
  }
  return result;
}

void Held::hold(size_t i, at::Tensor const& gradient, bool is_shared) {
  Row& row = rows_[i];
  row.numel = gradient.numel();
  row.type = gradient.scalar_type();
  row.layout.set_sizes(gradient.sizes());
  row.layout.set_strides(gradient.strides());
#if AMP_HAS_MATERIALIZER
  std::shared_ptr<Armed> known;
  if (is_shared) {
    known = shared_[&storage_of(gradient)].lock();
  }
  if (known || may_be_armed(gradient)) {
    row.storage = gradient.storage();
    row.offset = gradient.storage_offset();
    row.is_armed = true;
    if (!known) {
      at::Device const device = gradient.device();
      bool const is_elsewhere = !device.is_cpu() && !is_on_default_stream(device);
      if (is_elsewhere) {
        read_here(row.storage);
      }
      storage_of(row.storage).set_materializer(is_elsewhere && is_captured(device) ? &keep_copy_in_capture : &keep_copy);
    }
    if (is_shared) {
      row.shared = known ? known : std::make_shared<Armed>(row.storage);
      shared_[&storage_of(gradient)] = row.shared;
    }
  }
#else
  if (!is_shared && may_be_cloned_lazily(gradient)) {
    row.storage = at::native::_lazy_clone(gradient).storage();
  }
#endif
  if (!row.storage) {
    c10::NoGradGuard const no_grad;
    at::Tensor const copy = gradient.clone();
    row.layout.set_strides(copy.strides());
    row.storage = copy.storage();
  }
  row.address = storage_of(row.storage).data();
}

bool Held::is_laid_out_as(size_t i, at::Tensor const& t) const {
  return same_layout(rows_[i].layout.sizes_arrayref(), rows_[i].layout.strides_arrayref(), t);
}

c10::Storage Held::storage_of_values(size_t i) const {
  Row const& row = rows_[i];
#if AMP_HAS_MATERIALIZER
  if (row.is_armed) {
    c10::StorageImpl const& storage = storage_of(row.storage);
    if (c10::Storage const copy = copy_of(storage)) {
      read_here(copy);
      return copy;
    }
    if (!is_unwritten(storage) || storage.data() != row.address) {
      throw GradientLost(i);
    }
  }
#endif
  return row.storage;
}

void const* Held::data(size_t i) const {
  Row const& row = rows_[i];
  void const* memory = row.address;
#if AMP_HAS_MATERIALIZER
  if (row.is_armed && !(is_unwritten(storage_of(row.storage)) && storage_of(row.storage).data() == memory)) {
    memory = storage_of_values(i).data();
  }
#endif
  return static_cast<char const*>(memory) + row.offset * int64_t(c10::elementSize(row.type));
}

at::Tensor Held::tensor(size_t i) const {
  Row const& row = rows_[i];
  c10::NoGradGuard const no_grad;
  at::Tensor result = at::empty({0}, at::TensorOptions().dtype(row.type).device(device(i)));
  return result.set_(storage_of_values(i), row.offset, row.layout.sizes_arrayref(), row.layout.strides_arrayref());
}

OptionalTensors Held::tensors() const {
  OptionalTensors result(size());
  for (size_t i = 0; i < size(); ++i) {
    if (has(i)) {
      result[i] = tensor(i);
    }
  }
  return result;
}

std::vector<int64_t> Held::written() const {
  std::vector<int64_t> result;
#if AMP_HAS_MATERIALIZER
  for (size_t i = 0; i < size(); ++i) {
    if (rows_[i].is_armed && !is_unwritten(storage_of(rows_[i].storage))) {
      result.push_back(int64_t(i));
    }
  }
#endif
  return result;
}

}  // namespace amp_engine
