#include "tensor_lists.h"

#include <ATen/ops/_lazy_clone_native.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "checks.h"
#include "storage.h"

namespace amp_engine {
namespace {

Access access_of(at::Tensor const& grad, at::Tensor const& param) {
  auto const type = grad.scalar_type();
  if (grad.layout() != at::kStrided || (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) ||
      grad.unsafeGetTensorImpl()->is_python_dispatch() || is_lazy(grad) || !grad.is_non_overlapping_and_dense() ||
      !same_layout(grad, param)) {
    return Access::other;
  }
  bool const shared = grad.is_view() || grad.storage().nbytes() > size_t(grad.numel() * grad.element_size());
  return shared ? Access::shared : Access::own;
}

int64_t version_or_none(at::Tensor const& t) { return t.is_inference() ? -1 : int64_t(version_of(t)); }

// Not memory of others (numpy, DLPack), which copy-on-write cannot hold. On a GPU not beside the default stream: there
// torch makes a copy that somebody writes its own with a plain cudaMemcpy, which other streams do not wait for and a
// capture, whose stream is never the default one, does not allow.
bool may_be_copied_on_write(at::Tensor const& t) {
  c10::StorageImpl const& storage = *t.storage().unsafeGetStorageImpl();
  if (!c10::impl::cow::has_simple_data_ptr(storage) && !c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) {
    return false;
  }
  if (t.is_cpu()) {
    return true;
  }
  c10::impl::VirtualGuardImpl const guard(t.device().type());
  return guard.getStream(t.device()) == guard.getDefaultStream(t.device());
}

bool has_memory(at::Tensor const& t) {
  return t.layout() == at::kStrided && t.has_storage() && !t.unsafeGetTensorImpl()->is_python_dispatch();
}

// tensor.grad() asks first whether it is a leaf, to warn.
at::Tensor const& grad_of(at::Tensor const& t) { return t.unsafeGetTensorImpl()->grad(); }

}  // namespace

Stamp Stamp::of(at::Tensor const& t) {
  void const* const storage = t.has_storage() ? &storage_of(t) : nullptr;
  return {storage, t.const_data_ptr(), version_or_none(t), t.scalar_type(), t.device()};
}

void Marks::mark(Tensors const& tensors) {
  stamps_.resize(tensors.size(), Stamp{nullptr, nullptr, 0, at::kFloat, at::kCPU});
  storages_.resize(tensors.size(), decltype(storages_)::value_type(c10::intrusive_ptr<c10::StorageImpl>()));
  for_each(tensors, [&](size_t i, at::Tensor const& t) { mark(i, t); });
}

void Marks::mark(size_t i, at::Tensor const& t) {
  Stamp const now = Stamp::of(t);
  if (now.storage != nullptr && now.storage != stamps_[i].storage) {
    storages_[i] = t.storage().getWeakStorageImpl();
  }
  stamps_[i] = now;
}

void Marks::take(size_t i, Marks const& other, size_t j) {
  stamps_[i] = other.stamps_[j];
  storages_[i] = other.storages_[j];
}

bool Marks::have_moved(Tensors const& tensors) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    if (has_moved(i, *tensors[i])) {
      return true;
    }
  }
  return false;
}

bool Marks::has_moved(size_t i, at::Tensor const& t) const { return Stamp::of(t) != stamps_[i]; }

bool Marks::has_other_memory(size_t i, at::Tensor const& t) const {
  Stamp now = Stamp::of(t);
  if (now == stamps_[i]) {
    return false;
  }
  now.storage = stamps_[i].storage;
  now.address = stamps_[i].address;
  return now == stamps_[i];
}

GradientMarks::GradientMarks(Tensors const& params) {
  stamps_.reserve(params.size());
  for_each(params, [&](size_t, at::Tensor const& param) { stamps_.push_back(GradientStamp::of(param)); });
}

bool GradientMarks::have_moved(Tensors const& params) const {
  for (size_t i = 0; i < params.size(); ++i) {
    ask_ahead(params, i);
    if (GradientStamp::of(*params[i]) != stamps_[i]) {
      return true;
    }
  }
  return false;
}

std::vector<std::pair<size_t, bool>> GradientMarks::moved(Tensors const& params) const {
  std::vector<std::pair<size_t, bool>> result;
  for_each(params, [&](size_t i, at::Tensor const& param) {
    if (GradientStamp::of(param) != stamps_[i]) {
      result.emplace_back(i, stamps_[i].gradient != nullptr);
    }
  });
  return result;
}

GradientStamp GradientStamp::of(at::Tensor const& param) {
  at::Tensor const& grad = grad_of(param);
  if (!grad.defined()) {
    return {nullptr, -1, nullptr};
  }
  return {grad.unsafeGetTensorImpl(), version_or_none(grad), has_memory(grad) ? storage_of(grad).data_ptr().get() : nullptr};
}

Gradients gradients(Tensors const& params) {
  Gradients result;
  result.tensors.resize(params.size());
  result.accesses.resize(params.size(), char(Access::none));
  auto& devices = result.devices;
  for_each(params, [&](size_t i, at::Tensor const& param) {
    at::Tensor const& grad = grad_of(param);
    if (!grad.defined()) {
      return;
    }
    Access const access = access_of(grad, param);
    result.tensors[i] = grad;
    result.accesses[i] = char(access);
    if (access != Access::other && std::find(devices.begin(), devices.end(), grad.device()) == devices.end()) {
      devices.push_back(grad.device());
    }
  });
  return result;
}

OptionalTensors copies(OptionalTensors const& tensors, std::string const& accesses) {
  c10::NoGradGuard const no_grad;
  OptionalTensors result(tensors.size());
  for_each(tensors, [&](size_t i, at::Tensor const& t) {
    if (i < accesses.size() && Access(accesses[i]) != Access::none) {
      // Past the dispatcher, which takes longer than the clone: what has its own memory is a plain, dense tensor.
      bool const shares = Access(accesses[i]) == Access::own && may_be_copied_on_write(t);
      result[i] = shares ? at::native::_lazy_clone(t) : t.clone();
    }
  });
  return result;
}

OptionalTensors either(std::string const& mask, OptionalTensors const& first, OptionalTensors const* second) {
  TORCH_CHECK_VALUE(first.size() == mask.size() && (!second || second->size() == mask.size()), "either: mask has ",
                    mask.size(), " entries, but the lists have ", first.size(), " and ",
                    second ? second->size() : mask.size(), ".");
  OptionalTensors result(mask.size());
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] != 0) {
      result[i] = first[i];
    } else if (second) {
      result[i] = (*second)[i];
    }
  }
  return result;
}

bool any_gradient(Tensors const& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i);
    if (grad_of(*tensors[i]).defined()) {
      return true;
    }
  }
  return false;
}

void watch_gradients([[maybe_unused]] Tensors const& params) {
#if AMP_HAS_MATERIALIZER  // before it memory would become copy-on-write, which the next unscale would end
  for_each(params, [](size_t, at::Tensor const& param) {
    at::Tensor const& grad = grad_of(param);
    if (grad.defined() && has_memory(grad)) {
      watch(grad);
    }
  });
#endif
}

bool are_gradients_unwritten([[maybe_unused]] Tensors const& params) {
#if AMP_HAS_MATERIALIZER
  for (size_t i = 0; i < params.size(); ++i) {
    ask_ahead(params, i);
    at::Tensor const& grad = grad_of(*params[i]);
    if (grad.defined() && !(has_memory(grad) && is_sole(grad) && is_watched(storage_of(grad)))) {
      return false;
    }
  }
  return true;
#else
  return false;
#endif
}

void discard_gradients(Tensors const& tensors) {
  for_each(tensors, [](size_t, at::Tensor const& t) {
    if (grad_of(t).defined()) {
      t.mutable_grad() = at::Tensor();
    }
  });
}

}  // namespace amp_engine
