#include "tensor_lists.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/PyObjectSlot.h>

#include <algorithm>

#include "backend.h"
#include "checks.h"

namespace amp_engine {
namespace {

c10::StorageImpl& storage_of(at::Tensor const& t) {
  return *t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

Access access_of(at::Tensor const& grad, at::Tensor const& param) {
  auto const type = grad.scalar_type();
  bool const is_other = grad.layout() != at::kStrided ||
                        (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) ||
                        grad.unsafeGetTensorImpl()->is_python_dispatch() || is_lazy(grad) ||
                        !grad.is_non_overlapping_and_dense() || !same_layout(grad, param);
  return is_other ? Access::other : Access::taken;
}

int64_t version_or_none(at::Tensor const& t) { return t.is_inference() ? -1 : int64_t(version_of(t)); }

bool is_half(at::Tensor const& t) { return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16; }

bool has_graph(at::Tensor const& grad) { return grad.requires_grad() && grad.grad_fn(); }

bool has_memory(at::Tensor const& t) {
  return t.layout() == at::kStrided && t.has_storage() && !t.unsafeGetTensorImpl()->is_python_dispatch();
}

// New places of float32 tensors, laid out as half ones. Small ones share memory, as gradients in a bucket of
// DistributedDataParallel do: an allocation for each takes longer than all else that an exit does with them.
class Slabs {
 public:
  static bool is_small(at::Tensor const& half) { return bytes_of(half) <= kSmall; }

  // Counts a tensor that `place` will be called with.
  void expect(at::Tensor const& half) { expected_ += is_small(half) ? bytes_of(half) : 0; }

  Place place(at::Tensor const& half) {
    auto const options = half.options().dtype(at::kFloat);
    if (!is_small(half)) {
      return place_in(at::empty_like(half, options), 0, half);
    }
    int64_t const bytes = bytes_of(half);
    if (!slab_.defined() || end_ + bytes > int64_t(slab_.nbytes()) || slab_.device() != half.device()) {
      slab_ = at::empty({std::max(bytes, std::min(expected_, kSlab)) / kFloat}, options);
      end_ = 0;
    }
    end_ += bytes;
    expected_ -= bytes;
    return place_in(slab_, (end_ - bytes) / kFloat, half);
  }

 private:
  static Place place_in(at::Tensor base, int64_t offset, at::Tensor const& half) {
    float* const data = base.mutable_data_ptr<float>() + offset;
    return {std::move(base), offset, half.numel(), data};
  }

  static constexpr int64_t kFloat = sizeof(float), kAlignment = 64, kSmall = 16 << 10, kSlab = 1 << 20;

  static int64_t bytes_of(at::Tensor const& half) {
    return (half.numel() * kFloat + kAlignment - 1) / kAlignment * kAlignment;
  }
  at::Tensor slab_;
  int64_t end_ = 0, expected_ = 0;  // bytes
};

// True if nothing refers to a gradient but its parameter, the caller, and a Python object that nobody holds, and it is
// no view, and has no result of detach().
bool is_unshared(at::Tensor const& grad) {
  c10::TensorImpl& impl = *grad.unsafeGetTensorImpl();
  if (impl.autograd_meta() || impl.is_inference() || !impl.allow_tensor_metadata_change() ||
      !impl.version_counter().unique()) {
    return false;
  }
  size_t const uses = grad.use_count();
  return uses == 2 || (uses == 3 && impl.pyobj_slot()->has_unique_reference());
}

// Makes a parameter's gradient a float32 one in `place`. Where nobody can tell, it stays the same tensor: with many
// small ones, to make others and to free both takes as long as all else that an exit does.
void move(at::Tensor const& param, at::Tensor& grad, Place const& place) {
  if (is_unshared(grad)) {
    c10::TensorImpl& impl = *grad.unsafeGetTensorImpl();
    impl.set_storage_and_dtype(place.base.storage(), place.base.dtype());
    impl.set_storage_offset(place.offset);
    impl.bump_version();
  } else {
    grad = place.laid_out_as(grad);
    param.mutable_grad() = grad;
  }
}

}  // namespace

bool Place::is_free_for(at::Tensor const& half) const {
  // The storage has other memory after `share_memory_()`, which then is other processes', and after a resize.
  return base.defined() && base.storage().use_count() == 1 && base.device() == half.device() &&
         numel == half.numel() && size_t(offset + numel) * sizeof(float) <= base.storage().nbytes() &&
         base.mutable_data_ptr<float>() + offset == data;
}

at::Tensor Place::laid_out_as(at::Tensor const& half) const {
  // The way through torch's dispatcher takes four times as long.
  c10::Storage storage = base.storage();
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), base.key_set(), base.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(half.sizes(), half.strides(), offset);
  return made;
}

void count_apart(Tensors const& tensors) {
  auto const counter = [](at::Tensor const& t) -> c10::VariableVersion const& {
    return t.unsafeGetTensorImpl()->version_counter();
  };
  std::vector<at::Tensor> shared;  // with anything; one write counted for each shows which of them share
  for_each(tensors, [&](size_t, at::Tensor const& t) {
    if (counter(t).enabled() && !counter(t).unique()) {
      shared.push_back(t);
    }
  });
  std::vector<uint32_t> before;
  for (at::Tensor const& t : shared) {
    before.push_back(version_of(t));
  }
  for (at::Tensor const& t : shared) {
    t.unsafeGetTensorImpl()->bump_version();
  }
  std::vector<bool> together;
  for (size_t i = 0; i < shared.size(); ++i) {
    together.push_back(version_of(shared[i]) > before[i] + 1);
  }
  for (size_t i = 0; i < shared.size(); ++i) {
    c10::VariableVersion count = counter(shared[i]);
    count.set_version(before[i]);
    if (together[i]) {
      shared[i].unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(before[i]));
    }
  }
}

Mark Mark::of(at::Tensor const& t) {
  void const* const storage = t.has_storage() ? &storage_of(t) : nullptr;
  return {storage, t.const_data_ptr(), version_or_none(t), t.scalar_type(), t.device()};
}

void Marks::mark(Tensors const& tensors) {
  marks_.resize(tensors.size(), Mark{nullptr, nullptr, 0, at::kFloat, at::kCPU});
  storages_.resize(tensors.size(), decltype(storages_)::value_type(c10::intrusive_ptr<c10::StorageImpl>()));
  for_each(tensors, [&](size_t i, at::Tensor const& t) { mark(i, t); });
}

void Marks::mark(size_t i, at::Tensor const& t) {
  Mark const now = Mark::of(t);
  if (now.storage != nullptr && now.storage != marks_[i].storage) {
    storages_[i] = t.storage().getWeakStorageImpl();
  }
  marks_[i] = now;
}

void Marks::bump() {
  for (Mark& mark : marks_) {
    mark.version += mark.version >= 0;
  }
}

void Marks::take(size_t i, Marks const& other, size_t j) {
  marks_[i] = other.marks_[j];
  storages_[i] = other.storages_[j];
}

bool Marks::have_moved(Tensors const& tensors) const {
  return any_of(tensors, [&](size_t i, at::Tensor const& t) { return has_moved(i, t); });
}

bool Marks::has_moved(size_t i, at::Tensor const& t) const { return Mark::of(t) != marks_[i]; }

bool Marks::has_other_memory(size_t i, at::Tensor const& t) const {
  Mark now = Mark::of(t);
  if (now == marks_[i]) {
    return false;
  }
  now.storage = marks_[i].storage;
  now.address = marks_[i].address;
  return now == marks_[i];
}

GradientMarks::GradientMarks(Tensors const& params) {
  marks_.reserve(params.size());
  any_gradient_of(params, [&](size_t, at::Tensor const& grad) {
    add(grad);
    return false;
  });
}

bool GradientMarks::have_moved(Tensors const& params) const {
  return any_gradient_of(params, [&](size_t i, at::Tensor const& grad) { return GradientMark::of(grad) != marks_[i]; });
}

std::vector<std::pair<size_t, bool>> GradientMarks::moved(Tensors const& params) const {
  std::vector<std::pair<size_t, bool>> result;
  any_gradient_of(params, [&](size_t i, at::Tensor const& grad) {
    if (GradientMark::of(grad) != marks_[i]) {
      result.emplace_back(i, marks_[i].gradient != nullptr);
    }
    return false;
  });
  return result;
}

GradientMark GradientMark::of(at::Tensor const& grad) {
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
  for (size_t i = 0; i < params.size(); ++i) {
    ask_ahead_for_gradients(params, i);
    at::Tensor const& grad = grad_of(*params[i]);
    if (!grad.defined()) {
      continue;
    }
    Access const access = access_of(grad, *params[i]);
    result.accesses[i] = char(access);
    result.tensors[i] = grad;
    result.has_graph |= has_graph(grad);
    if (access != Access::other && std::find(devices.begin(), devices.end(), grad.device()) == devices.end()) {
      devices.push_back(grad.device());
    }
  }
  return result;
}

OptionalTensors where(std::string const& mask, OptionalTensors const& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == mask.size(), "where: mask has ", mask.size(), " entries, but tensors has ",
                    tensors.size(), ".");
  OptionalTensors result(mask.size());
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] != 0) {
      result[i] = tensors[i];
    }
  }
  return result;
}

OptionalTensors unscaled_outputs(std::string const& plain, OptionalTensors const& gradients) {
  TORCH_CHECK_VALUE(gradients.size() == plain.size(), "unscaled_outputs: plain has ", plain.size(),
                    " entries, but gradients has ", gradients.size(), ".");
  OptionalTensors result(gradients);
  auto const is_new = [&](size_t i) { return plain[i] == 0 && result[i] && is_half(*result[i]); };
  Slabs slabs;
  for (size_t i = 0; i < result.size(); ++i) {
    if (is_new(i)) {
      slabs.expect(*result[i]);
    }
  }
  for (size_t i = 0; i < result.size(); ++i) {
    if (is_new(i)) {
      result[i] = slabs.place(*result[i]).laid_out_as(*result[i]);
    }
  }
  return result;
}

void replace_gradients(Tensors const& params, OptionalTensors const& before, OptionalTensors const& after) {
  TORCH_CHECK_VALUE(before.size() == params.size() && after.size() == params.size(), "replace_gradients: there are ",
                    params.size(), " parameters, but ", before.size(), " and ", after.size(), " gradients.");
  for (size_t i = 0; i < params.size(); ++i) {
    if (after[i] && !(before[i] && before[i]->is_same(*after[i]))) {
      params[i]->mutable_grad() = *after[i];
    }
  }
}

std::optional<Looked> look(ListOperation& check, GradientMemory& memory, Tensors const& params,
                           std::string const& plain, bool unscales, bool keeps_half, at::Tensor const& scale,
                           at::Tensor const& found_inf, at::Tensor const& norm, ScaleTensors const* update) {
  TORCH_CHECK_VALUE(params.size() == plain.size(), "look: there are ", params.size(), " parameters, but plain has ",
                    plain.size(), " entries.");
  Gradients found = gradients(params);
  bool const takes_all = found.devices.size() == 1 && found.devices[0] == found_inf.device() &&
                         found.accesses.find(char(Access::other)) == std::string::npos &&
                         !(unscales && found.has_graph);
  if (!takes_all) {
    return std::nullopt;
  }
  OptionalTensors& own = found.tensors;
  bool kept = unscales && keeps_half;
  for (size_t i = 0; kept && i < plain.size(); ++i) {
    kept = plain[i] != 0 || !own[i] || is_half(*own[i]);
  }
  auto const is_half_beside = [&](size_t i) { return plain[i] == 0 && own[i] && is_half(*own[i]); };
  OptionalTensors in_place;  // empty if there is none
  std::vector<Place>& places = memory.places;
  std::vector<void*>& addresses = memory.addresses;
  places.resize(unscales && !kept ? plain.size() : 0);
  addresses.assign(places.size(), nullptr);
  Slabs slabs;
  bool reuses = true;
  int64_t written = 0;  // floats
  for (size_t i = 0; unscales && i < own.size(); ++i) {
    if (!is_half_beside(i)) {
      if (own[i]) {
        in_place.resize(own.size());
        in_place[i] = own[i];
      }
    } else if (!kept) {
      written += own[i]->numel();
      if (places[i].is_free_for(*own[i])) {
        addresses[i] = places[i].data;
      } else {
        reuses = false;
        places[i] = {};
        slabs.expect(*own[i]);
      }
    }
  }
  for (size_t i = 0; !reuses && i < places.size(); ++i) {
    if (is_half_beside(i) && !places[i].base.defined()) {
      places[i] = slabs.place(*own[i]);
      addresses[i] = places[i].data;
    }
  }
  // An exit and a step of Adam move 36 bytes for each gradient. Memory that the system has just filled is in the caches.
  bool const streamed =
      found_inf.is_cpu() && memory.streams.value_or(reuses && cpu::outgrows_caches(36 * written));
  Checks const checks = check.run("check", own,
                                  {.outs = in_place.empty() ? nullptr : &in_place,
                                   .memory = places.empty() ? nullptr : &addresses,
                                   .a = scale,
                                   .reciprocal = true,
                                   .found_inf = found_inf,
                                   .norm = norm,
                                   .norm_scale = scale,
                                   .update = update,
                                   .known = true,
                                   .streamed = streamed});
  c10::Storage end;
  GradientMarks marks(own.size());  // no memory is asked for below, where that of halves is freed
  for (size_t i = 0; i < own.size(); ++i) {
    ask_ahead(own, i);
    if (!places.empty() && is_half_beside(i)) {
      bool const is_own = !Slabs::is_small(*own[i]) && own[i]->storage().nbytes() == own[i]->nbytes();
      if (is_own && (!end || own[i]->storage().data() > end.data())) {
        end = own[i]->storage();
      }
      move(*params[i], *own[i], places[i]);
    }
    marks.add(own[i] ? *own[i] : at::Tensor());
  }
  memory.end = std::move(end);
  if (!found_inf.is_cpu()) {
    memory.clear();
  }
  return Looked{checks, std::move(found.accesses), std::move(own), std::move(marks), kept};
}

bool any_graph(Tensors const& tensors) {
  return any_gradient_of(tensors, [](size_t, at::Tensor const& grad) { return grad.defined() && has_graph(grad); });
}

bool any_other(Tensors const& params) {
  return any_gradient_of(params, [&](size_t i, at::Tensor const& grad) {
    return grad.defined() && access_of(grad, *params[i]) == Access::other;
  });
}

bool any_gradient(Tensors const& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead(tensors, i, ask_for_pointers, ask_for_gradient);
    if (grad_of(*tensors[i]).defined()) {
      return true;
    }
  }
  return false;
}

void discard_gradients(Tensors const& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ask_ahead_for_gradients(tensors, i);
    if (grad_of(*tensors[i]).defined()) {
      tensors[i]->mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace amp_engine
