#include "walk.h"

#include <ATen/ops/_lazy_clone_native.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "checks.h"

namespace amp_engine {
namespace {

Walk walk_of(at::Tensor const& grad, at::Tensor const& param) {
  auto const type = grad.scalar_type();
  if (grad.layout() != at::kStrided || (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) ||
      grad.unsafeGetTensorImpl()->is_python_dispatch() || !grad.is_non_overlapping_and_dense() ||
      !same_layout(grad, param)) {
    return Walk::other;
  }
  bool const shared = grad.is_view() || grad.storage().nbytes() > size_t(grad.numel() * grad.element_size());
  return shared ? Walk::shared : Walk::own;
}

}  // namespace

std::string stamps(std::vector<at::Tensor> const& tensors) {
  struct Stamp {
    void const* address;
    int64_t version;
    int type, device, index, unused;
  };
  static_assert(sizeof(Stamp) == 32);
  std::string result;
  result.reserve(tensors.size() * sizeof(Stamp));
  for (at::Tensor const& t : tensors) {
    // Inference tensors keep no version.
    Stamp const stamp{t.const_data_ptr(),     t.is_inference() ? -1 : int64_t(t._version()), int(t.scalar_type()),
                      int(t.device().type()), t.device().index(),                            0};
    result.append(reinterpret_cast<char const*>(&stamp), sizeof stamp);
  }
  return result;
}

Gradients gradients(std::vector<at::Tensor> const& params) {
  Gradients result;
  result.tensors.resize(params.size());
  result.walks.resize(params.size(), char(Walk::none));
  auto& devices = result.devices;
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor const& grad = params[i].grad();
    if (!grad.defined()) {
      continue;
    }
    Walk const walk = walk_of(grad, params[i]);
    result.tensors[i] = grad;
    result.walks[i] = char(walk);
    if (walk != Walk::other && std::find(devices.begin(), devices.end(), grad.device()) == devices.end()) {
      devices.push_back(grad.device());
    }
  }
  return result;
}

std::vector<std::optional<at::Tensor>> copies(std::vector<std::optional<at::Tensor>> const& tensors,
                                              std::string const& walks) {
  c10::NoGradGuard const no_grad;
  std::vector<std::optional<at::Tensor>> result(tensors.size());
  for (size_t i = 0; i < tensors.size() && i < walks.size(); ++i) {
    if (tensors[i] && Walk(walks[i]) != Walk::none) {
      // Past the dispatcher, which takes longer than the clone: what has its own memory is a plain, dense tensor.
      result[i] = Walk(walks[i]) == Walk::own ? at::native::_lazy_clone(*tensors[i]) : tensors[i]->clone();
    }
  }
  return result;
}

bool any_gradient(std::vector<at::Tensor> const& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](at::Tensor const& t) { return t.grad().defined(); });
}

void drop_gradients(std::vector<at::Tensor> const& tensors) {
  for (at::Tensor const& t : tensors) {
    t.mutable_grad() = at::Tensor();
  }
}

}  // namespace amp_engine
