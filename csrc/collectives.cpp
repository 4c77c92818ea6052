#include "collectives.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>

#include "storage.h"

namespace py = pybind11;

namespace amp_engine {
namespace {

PyObject* on_write = nullptr;

template <class Visit>
void for_each_tensor(c10::IValue const& value, Visit const& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (c10::IValue const& part : value.toListRef()) {
      for_each_tensor(part, visit);
    }
  }
}

// Requests the memory of a watched or copy-on-write storage. The request changes the storage, and two threads must not
// do that at once, as the threads of a backend of c10d would.
void ask_for_memory(at::Tensor const& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return;
  }
  c10::StorageImpl& storage = storage_of(tensor);
  if (is_watched(storage) || c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) {
    storage.mutable_data();
  }
}

template <bool writes>
void kernel(c10::OperatorHandle const& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  size_t const first = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> written;
  if (writes) {
    for_each_tensor((*stack)[first], [&](at::Tensor const& t) { written.push_back(t); });
  }
  for (size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], ask_for_memory);
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  if (writes) {
    py::gil_scoped_acquire const gil;
    py::reinterpret_borrow<py::object>(on_write)(std::move(written), op.schema().name() == "c10d::broadcast_");
  }
}

bool is_written(c10::Argument const& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void list_kernel(c10::OperatorHandle const& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto const& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(arguments[i])) {
      for_each_tensor((*stack)[stack->size() - arguments.size() + i], ask_for_memory);
    }
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
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

void ask_for_written_lists() {
  auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (c10::OperatorName const& name : dispatcher.getAllOpNames()) {
    auto const begins = [&](char const* with) { return name.name.rfind(with, 0) == 0; };
    if (!begins("aten::_foreach_") && !begins("aten::_fused_") && !begins("aten::_amp_foreach_")) {
      continue;
    }
    auto const op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
      continue;
    }
    auto const& arguments = op->schema().arguments();
    if (std::any_of(arguments.begin(), arguments.end(), is_written)) {
      library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&list_kernel>());
    }
  }
}

}  // namespace amp_engine
