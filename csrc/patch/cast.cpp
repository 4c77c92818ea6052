#include "cast.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/GradMode.h>

namespace amp_engine::patch {

at::Tensor cast(at::Tensor const& tensor, at::ScalarType type) {
  bool const has_autograd = tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  bool const needs_autograd =
      has_autograd && ((c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined());
  auto const copy = [&] {  // the operator that tensor.to(type) calls
    return at::_to_copy(tensor, type, std::nullopt, std::nullopt, std::nullopt, false, std::nullopt);
  };
  if (needs_autograd) {
    return copy();
  }
  at::AutoDispatchBelowADInplaceOrView const below_autograd;  // saves a third of the time
  return copy();
}

}  // namespace amp_engine::patch
