#include "collectives.h"

#include <torch/library.h>

#include <algorithm>

#include "storage.h"

namespace py = pybind11;

namespace amp_engine {
namespace {

PyObject* on_write = nullptr;

void collect(c10::IValue const& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (c10::IValue const& part : value.toListRef()) {
      collect(part, tensors);
    }
  }
}

// Whoever asks for the memory of a watched storage changes the storage itself, which two threads must not do at once.
void ask_for_memory(at::Tensor const& tensor) {
  if (tensor.defined() && tensor.has_storage() && is_watched(storage_of(tensor))) {
    storage_of(tensor).mutable_data();
  }
}

template <bool writes>
void kernel(c10::OperatorHandle const& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  size_t const first = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> tensors;
  collect((*stack)[first], tensors);
  size_t const written = tensors.size();
  for (size_t i = first + 1; i < stack->size(); ++i) {
    collect((*stack)[i], tensors);
  }
  std::for_each(tensors.begin(), tensors.end(), ask_for_memory);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  if (writes) {
    tensors.resize(written);
    py::gil_scoped_acquire const gil;
    py::reinterpret_borrow<py::object>(on_write)(std::move(tensors), op.schema().name() == "c10d::broadcast_");
  }
}

}  // namespace

void watch_collectives(std::vector<std::string> const& writing, std::vector<std::string> const& reading,
                       py::object listener) {
  TORCH_CHECK_VALUE(on_write == nullptr, "watch_collectives: called before.");
  on_write = listener.release().ptr();
  auto* const library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
  for (std::string const& name : writing) {
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<true>>());
  }
  for (std::string const& name : reading) {
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<false>>());
  }
}

}  // namespace amp_engine
