#include "weight_cache.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <utility>

#include "cast.h"
#include "tensor_lists.h"

namespace py = pybind11;

namespace amp_engine::patch {
namespace {

py::object wrap(at::Tensor const& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Sets a flag when a backward comes to a cast, or when compiled autograd records it.
class Spent : public torch::autograd::FunctionPreHook {
 public:
  explicit Spent(std::shared_ptr<std::atomic<bool>> flag) : flag_(std::move(flag)) {}

  torch::autograd::variable_list operator()(torch::autograd::variable_list const& gradients) override {
    set();
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { set(); }

 private:
  void set() const { flag_->store(true, std::memory_order_relaxed); }

  std::shared_ptr<std::atomic<bool>> flag_;
};

}  // namespace

bool WeightCache::Entry::is_current(at::Tensor const& weight, at::ScalarType low) const {
  return cast.scalar_type() == low && version == version_of(weight) && address == weight.const_data_ptr() &&
         cast_version == version_of(cast) && requires_grad == weight.requires_grad();
}

std::vector<at::Tensor> WeightCache::kept() const {
  std::vector<at::Tensor> result;
  for (auto const& item : entries_) {
    result.push_back(item.second.cast);
  }
  return result;
}

bool WeightCache::is_over() const {
  // A checkpoint that computes a forward again, in the backward, takes the casts of the first time.
  return is_spent_->load(std::memory_order_relaxed) && torch::autograd::get_current_graph_task_id() == -1;
}

PyObject* WeightCache::find(at::Tensor const& weight, at::ScalarType low) const {
  if (!c10::GradMode::is_enabled() || is_over()) {
    return nullptr;
  }
  auto const found = entries_.find(weight.unsafeGetTensorImpl());
  bool const is_there = found != entries_.end() && found->second.is_current(weight, low);
  return is_there ? Py_XNewRef(found->second.object.ptr()) : nullptr;
}

WeightCache::Cast WeightCache::cast(at::Tensor weight, at::ScalarType low) {
  if (PyObject* const found = find(weight, low)) {
    return {py::reinterpret_steal<py::object>(found), false};
  }
  if (is_over()) {
    clear();
  }
  uint64_t const clears = clears_;
  uint32_t const version = version_of(weight);
  void const* const address = weight.const_data_ptr();
  bool const requires_grad = weight.requires_grad();
  at::Tensor made;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (!weight.is_cuda()) {  // on a GPU it is only a launch
      no_gil.emplace();
    }
    made = patch::cast(weight, low);
  }
  py::object result = wrap(made);
  bool const keeps = c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  std::optional<Entry> replaced;
  if (keeps && clears == clears_) {  // otherwise the weight may have been written meanwhile
    auto const found = entries_.find(weight.unsafeGetTensorImpl());
    if (found != entries_.end()) {
      replaced = std::move(found->second);
      entries_.erase(found);
    }
    uint32_t const cast_version = version_of(made);
    if (auto const& node = made.grad_fn()) {
      node->add_pre_hook(std::make_unique<Spent>(is_spent_));
    }
    entries_.emplace(weight.unsafeGetTensorImpl(), Entry{decltype(Entry::weight)(weight.getIntrusivePtr()), result,
                                                         std::move(made), version, cast_version, address, requires_grad});
  }
  return {std::move(result), true};
}

void WeightCache::clear() {
  ++clears_;
  is_spent_->store(false, std::memory_order_relaxed);
  auto const discarded = std::exchange(entries_, {});
}

}  // namespace amp_engine::patch
