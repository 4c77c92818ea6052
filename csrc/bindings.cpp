// The Python bindings of ops.h: amp_engine._C. Only amp_engine/kernels uses them, and it documents each operation.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <variant>

#include "ops.h"
#include "patch/function.h"
#include "tensor_lists.h"

#ifdef AMP_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace py = pybind11;

namespace amp_engine {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Has no Python objects of its tensors: ten thousand objects more or less decide when the garbage collector runs, and
// it takes longer than a step.
struct TensorList {
  OptionalTensors tensors;
};

using TensorsOrList = std::variant<TensorList*, OptionalTensors>;

OptionalTensors const& in(TensorsOrList const& tensors) {
  return std::holds_alternative<TensorList*>(tensors) ? std::get<TensorList*>(tensors)->tensors
                                                      : std::get<OptionalTensors>(tensors);
}

// Holds Python objects, because torch.utils.swap_tensors refuses tensors that C++ refers to for longer than a call.
class Params {
 public:
  explicit Params(py::iterable const& tensors) {
    for (py::handle const tensor : tensors) {
      tensor.cast<at::Tensor>();  // raises if it is not a tensor
      objects_.push_back(py::reinterpret_borrow<py::object>(tensor));
      list_.push_back(&THPVariable_Unpack(tensor.ptr()));
    }
  }

  at::Tensor const& at(size_t i) const {
    if (i >= list_.size()) {
      throw py::index_error();
    }
    return *list_[i];
  }
  Tensors const& list() const { return list_; }

 private:
  std::vector<py::object> objects_;
  Tensors list_;  // each in its Python object, which swap_tensors writes in place
};
using ParamsOrList = std::variant<Params*, std::vector<at::Tensor>>;

// The result is valid until the end of the expression.
Tensors const& in(ParamsOrList const& tensors, Tensors&& made = {}) {
  if (auto const* const params = std::get_if<Params*>(&tensors)) {
    return (*params)->list();
  }
  for (at::Tensor const& t : std::get<std::vector<at::Tensor>>(tensors)) {
    made.push_back(&t);
  }
  return made;
}

// Parameters and their marks.
struct ParamMarks {
  Params params;
  Marks marks;

  explicit ParamMarks(py::iterable const& tensors) : params(tensors) { marks.mark(params.list()); }
};

// Parameters and the marks of their gradients.
struct ParamGradientMarks {
  std::shared_ptr<Params> params;
  GradientMarks marks;

};

// A list operation, and the memory of the gradients that it writes.
struct ListCheck : ListOperation {
  GradientMemory memory;
};

py::tuple as_tuple(Checks const& checks) { return py::make_tuple(checks.nonfinite, checks.sum_squares, checks.largest); }

Formula formula_of(std::string const& name) {
#define X(formula, type)  \
  if (name == #formula) { \
    return Formula::formula; \
  }
  AMP_OPTIMIZERS(X)
#undef X
  std::string known;
#define X(formula, type) known += (known.empty() ? "" : ", ") + std::string(#formula);
  AMP_OPTIMIZERS(X)
#undef X
  C10_THROW_ERROR(ValueError, "StepTable: formula is '" + name + "', but must be one of " + known + ".");
}

char const* name_of(Formula formula) {
#define X(name, type) \
  case Formula::name:    \
    return #name;
  switch (formula) { AMP_OPTIMIZERS(X) }
#undef X
  return "";
}

// Reads the fields of an optimizer's formula, an object of amp_engine.kernels.formulas. Adds a learning rate that is on
// the device to `learning_rates`, which keeps it alive.
Group group_of(Formula formula, py::handle h, at::Device device, std::vector<at::Tensor>& learning_rates) {
  Group group;
  std::memset(&group, 0, sizeof group);  // padding included, because an upload compares bytes
  py::object const lr = h.attr("lr");
  if (THPVariable_Check(lr.ptr())) {
    auto const tensor = lr.cast<at::Tensor>();
    if (tensor.device() == device && !device.is_cpu()) {
      learning_rates.push_back(tensor.to(at::kFloat));
      group.lr_on_device = learning_rates.back().const_data_ptr<float>();
    } else {
      group.lr = tensor.item<double>();
    }
  } else {
    group.lr = lr.cast<double>();
  }
  group.maximize = h.attr("maximize").cast<bool>();
  with_optimizer(formula, [&](auto update) {
    HyperOf<decltype(update)>::in(group).visit([&](char const* name, auto& value) {
      TORCH_CHECK_TYPE(py::hasattr(h, name), "StepTable.step: groups holds no hyperparameters of ", name_of(formula),
                       ": there is no ", name, " in it.");
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>) {
        value = h.attr(name).cast<double>();
      } else {
        value = h.attr(name).cast<bool>();
      }
    });
  });
  return group;
}

py::tuple check(OptionalTensors const& tensors) {
  return as_tuple(ListOperation().run("check", tensors, {}));
}

py::tuple scale_(OptionalTensors const& outputs, OptionalTensors const& inputs, at::Tensor const& factor) {
  return as_tuple(ListOperation().run("scale_", inputs, {.outs = &outputs, .a = factor}));
}

void cast_copy_(OptionalTensors const& outputs, OptionalTensors const& inputs) {
  ListOperation().run("cast_copy_", inputs, {.outs = &outputs, .checked = false});
}

py::tuple axpby_(OptionalTensors const& outputs, OptionalTensors const& xs, OptionalTensors const& ys,
                 OptionalTensor const& a, OptionalTensor const& b) {
  return as_tuple(ListOperation().run("axpby_", xs, {.outs = &outputs, .ys = &ys, .a = a, .b = b}));
}

ScaleTensors scale_tensors(at::Tensor scale, at::Tensor growth_tracker, at::Tensor found_inf, double growth_factor,
                           double backoff_factor, int growth_interval, double min_scale, double max_scale,
                           OptionalTensor hysteresis_tracker, int hysteresis, bool dynamic, OptionalTensor inv_scale_used,
                           OptionalTensor outcome, OptionalTensor scale_used, OptionalTensor loss) {
  return {std::move(scale),
          std::move(growth_tracker),
          std::move(found_inf),
          std::move(hysteresis_tracker),
          std::move(inv_scale_used),
          std::move(outcome),
          std::move(scale_used),
          std::move(loss),
          {growth_factor, backoff_factor, min_scale, max_scale, growth_interval, hysteresis, dynamic}};
}

template <class... Args>
std::tuple<Args...> arguments_of(ScaleTensors (*)(Args...));
using ScaleArguments = decltype(arguments_of(scale_tensors));  // in positional order

template <class... Args>
auto updating(ScaleTensors (*tensors)(Args...)) {
  return [tensors](Args... args) { update_scale(tensors(std::move(args)...)); };
}

// True if two sequences have the same objects (by identity). Does not touch the objects.
bool same_objects(py::object const& a, py::object const& b) {
  auto const fast = [](py::object const& sequence) {
    auto const result = py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "not a sequence"));
    return result ? result : throw py::error_already_set();
  };
  py::object const x = fast(a), y = fast(b);
  Py_ssize_t const n = PySequence_Fast_GET_SIZE(x.ptr());
  PyObject** const first = PySequence_Fast_ITEMS(x.ptr());
  return PySequence_Fast_GET_SIZE(y.ptr()) == n && std::equal(first, first + n, PySequence_Fast_ITEMS(y.ptr()));
}

// True if dicts[i][name] is objects[i] (by identity), for all i and each pair of `named`. None also stands for a
// missing entry.
bool same_entries(py::list const& dicts, std::vector<std::pair<py::str, py::list>> const& named) {
  constexpr size_t kAhead = 4;
  size_t const n = dicts.size();
  for (auto const& [name, objects] : named) {
    TORCH_CHECK_VALUE(objects.size() == n, "same_entries: there are ", n, " dictionaries and ", objects.size(), " objects.");
  }
  PyObject* const* const each = PySequence_Fast_ITEMS(dicts.ptr());
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) {
      __builtin_prefetch(each[i + 2 * kAhead]);
    }
    if (i + kAhead < n) {
      auto const* const keys = reinterpret_cast<char const*>(reinterpret_cast<PyDictObject*>(each[i + kAhead])->ma_keys);
      __builtin_prefetch(keys);
      __builtin_prefetch(keys + 64);
      __builtin_prefetch(keys + 128);
    }
    for (auto const& [name, objects] : named) {
      PyObject* const found = PyDict_GetItemWithError(each[i], name.ptr());
      if ((found ? found : Py_None) != PyList_GET_ITEM(objects.ptr(), Py_ssize_t(i))) {
        return false;
      }
    }
  }
  return true;
}

// Raises the errors of amp_engine.errors for refused arguments.
void translate(std::exception_ptr thrown) {
  auto const raise = [](char const* kind, char const* message) {
    py::object const type = py::module_::import("amp_engine.errors").attr(kind);
    PyErr_SetString(type.ptr(), message);
  };
  try {
    std::rethrow_exception(thrown);
  } catch (c10::ValueError const& error) {
    raise("AmpValueError", error.what_without_backtrace());
  } catch (c10::TypeError const& error) {
    raise("AmpTypeError", error.what_without_backtrace());
  }
}

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
#ifdef AMP_WITH_CUDA
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
  info["cuda"] = py::none();
#endif
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "g++ " __VERSION__;
#endif
  info["cpu_capability"] = cpu::capability();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of amp_engine. Use amp_engine.kernels, whose operations on lists compute in PyTorch without them.";
  m.attr("has_cuda") = has_cuda();
  py::register_local_exception_translator(&translate);
  patch::bind(m);
  m.def("build_info", &build_info, "The versions that this module was compiled against, and the instruction set that it chose.");
  // amp_engine.kernels.ops documents these.
  m.def("check", &check, py::arg("tensors"));
  m.def("scale_", &scale_, py::arg("outputs"), py::arg("inputs"), py::arg("factor"));
  m.def("axpby_", &axpby_, py::arg("outputs"), py::arg("xs"), py::arg("ys"), py::arg("a"), py::arg("b"));
  m.def("cast_copy_", &cast_copy_, py::arg("outputs"), py::arg("inputs"));
  m.def(
      "update_scale_",
      updating(scale_tensors),
      py::arg("scale"), py::arg("growth_tracker"), py::arg("found_inf"), py::arg("growth_factor"),
      py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("min_scale"), py::arg("max_scale"),
      py::arg("hysteresis_tracker") = py::none(), py::arg("hysteresis") = 1, py::arg("dynamic") = true,
      py::arg("inv_scale_used") = py::none(), py::arg("outcome") = py::none(), py::arg("scale_used") = py::none(),
      py::arg("loss") = py::none());

  py::class_<Params, std::shared_ptr<Params>>(m, "params", "Tensors whose Python list was read once.")
      .def(py::init<py::iterable const&>())
      .def("__len__", [](Params const& self) { return self.list().size(); });
  py::class_<ParamMarks>(m, "marks", "Some tensors as they were when each was last marked.")
      .def(py::init<py::iterable const&>())
      .def("mark", [](ParamMarks& self) { self.marks.mark(self.params.list()); })
      .def("bump", [](ParamMarks& self) { self.marks.bump(); })
      .def("mark_at", [](ParamMarks& self, size_t i) { self.marks.mark(i, self.params.at(i)); })
      .def("take", [](ParamMarks& self, size_t i, ParamMarks const& other, size_t j) {
        self.params.at(i), other.params.at(j);
        self.marks.take(i, other.marks, j);
      })
      .def("have_moved", [](ParamMarks const& self) { return self.marks.have_moved(self.params.list()); })
      .def("has_moved", [](ParamMarks const& self, size_t i) { return self.marks.has_moved(i, self.params.at(i)); })
      .def("has_other_memory",
           [](ParamMarks const& self, size_t i) { return self.marks.has_other_memory(i, self.params.at(i)); });
  py::class_<ParamGradientMarks>(m, "gradient_marks", "The gradients of some parameters as they were.")
      .def(py::init([](std::shared_ptr<Params> const& params) {
        return ParamGradientMarks{params, GradientMarks(params->list())};
      }))
      .def_property_readonly("params", [](ParamGradientMarks const& self) { return self.params; })
      .def("have_moved", [](ParamGradientMarks const& self) { return self.marks.have_moved(self.params->list()); })
      .def("moved", [](ParamGradientMarks const& self) { return self.marks.moved(self.params->list()); });
  m.def(
      "gradients",
      [named = py::object(py::module_::import("amp_engine.kernels.backend").attr("Gradients"))](
          ParamsOrList const& params) {
        Gradients found = gradients(in(params));
        return named(TensorList{std::move(found.tensors)}, py::bytes(found.accesses), std::move(found.devices));
      },
      "The gradient of each parameter, how the kernels can take it, and on which devices they find them.");
  py::class_<TensorList>(m, "TensorList", "Tensors and Nones; reading an entry makes its Python object.")
      .def("__len__", [](TensorList const& self) { return self.tensors.size(); })
      .def("__getitem__", [](TensorList const& self, size_t i) {
        if (i >= self.tensors.size()) {
          throw py::index_error();
        }
        return self.tensors[i];
      });
  m.def(
      "where", [](py::bytes const& mask, TensorsOrList const& tensors) { return TensorList{where(mask, in(tensors))}; },
      "tensors[i] if mask[i] else None.");
  m.def(
      "unscaled_outputs",
      [](py::bytes const& plain, TensorsOrList const& gradients) {
        return TensorList{unscaled_outputs(plain, in(gradients))};
      },
      "New float32 memory for each half gradient whose byte in plain is 0, else the gradient itself.");
  m.def(
      "replace_gradients",
      [](ParamsOrList const& params, TensorsOrList const& before, TensorsOrList const& after) {
        replace_gradients(in(params), in(before), in(after));
      },
      "params[i].grad = after[i], where that is another tensor than before[i].");
  m.def(
      "any_gradient", [](ParamsOrList const& tensors) { return any_gradient(in(tensors)); },
      "True if one of the tensors has a gradient.");
  m.def(
      "any_graph", [](ParamsOrList const& tensors) { return any_graph(in(tensors)); },
      "True if one of the gradients has a graph.");
  m.def(
      "any_other", [](ParamsOrList const& params) { return any_other(in(params)); },
      "True if the kernels cannot take the gradient of one of the parameters.");
  m.def(
      "count_apart", [](ParamsOrList const& tensors) { count_apart(in(tensors)); },
      "Give tensors that count their writes together a count each.");
  m.def("same_objects", &same_objects, "True if two sequences have the same objects, by identity.");
  m.def("same_entries", &same_entries, "True if each dictionary has its object under each name.");
  m.def(
      "discard_gradients", [](ParamsOrList const& tensors) { discard_gradients(in(tensors)); },
      "tensor.grad = None for each.");

  py::class_<ListCheck>(m, "ListCheck")
      .def(py::init([](std::optional<bool> streams) {
             auto made = std::make_unique<ListCheck>();
             made->memory.streams = streams;
             return made;
           }),
           py::arg("stream_gradients") = py::none())
      .def("run",
           [](ListCheck& self, TensorsOrList const& tensors, std::optional<TensorsOrList> const& outputs,
              at::Tensor const& scale, at::Tensor const& found_inf, at::Tensor const& norm,
              std::optional<ScaleArguments> const& update) {
             ScaleTensors const moving = update ? std::apply(scale_tensors, *update) : ScaleTensors();
             return as_tuple(self.run("check", in(tensors),
                                      {.outs = outputs ? &in(*outputs) : nullptr,
                                       .a = scale,
                                       .reciprocal = true,
                                       .found_inf = found_inf,
                                       .norm = norm,
                                       .norm_scale = scale,
                                       .update = update ? &moving : nullptr}));
           })
      .def("look",
           [](ListCheck& self, std::shared_ptr<Params> const& params, py::bytes const& plain, bool unscales,
              bool keeps_half, at::Tensor const& scale, at::Tensor const& found_inf, at::Tensor const& norm,
              std::optional<ScaleArguments> const& update) -> py::object {
             ScaleTensors const moving = update ? std::apply(scale_tensors, *update) : ScaleTensors();
             std::optional<Looked> found = look(self, self.memory, params->list(), plain, unscales, keeps_half, scale,
                                                found_inf, norm, update ? &moving : nullptr);
             if (!found) {
               return py::none();
             }
             return py::make_tuple(as_tuple(found->checks), py::bytes(found->accesses),
                                   TensorList{std::move(found->gradients)},
                                   ParamGradientMarks{params, std::move(found->marks)}, found->kept);
           })
      .def("forget_gradients", [](ListCheck& self) { self.memory.clear(); })
      .def("clip_", [](ListCheck& self, TensorsOrList const& tensors, at::Tensor const& norm, double max_norm) {
        self.run("clip_", in(tensors),
                 {.outs = &in(tensors), .checked = false, .clip_norm = norm, .max_norm = max_norm});
      });

  py::class_<StepTable>(m, "StepTable")
      .def(py::init([](std::string const& formula, OptionalTensors weights, OptionalTensors copies, OptionalTensors state1,
                       OptionalTensors state2, std::vector<uint32_t> const& groups, at::Tensor steps,
                       OptionalTensor norms, bool adopts, std::optional<bool> stream_copies) {
             return std::make_unique<StepTable>(formula_of(formula), std::move(weights), std::move(copies), std::move(state1),
                                                std::move(state2), groups, std::move(steps), std::move(norms),
                                                adopts, stream_copies);
           }),
           py::arg("formula"), py::arg("weights"), py::arg("copies"), py::arg("state1"), py::arg("state2"),
           py::arg("groups"), py::arg("steps"), py::arg("norms") = py::none(), py::arg("adopts") = false,
           py::arg("stream_copies") = py::none())
      .def("is_current", &StepTable::is_current)
      .def("__len__", &StepTable::size)
      .def(
          "step",
          [](StepTable& self, TensorsOrList const& grads, std::variant<py::bytes, std::vector<int>> const& scaled_by, py::list const& groups,
             OptionalTensor const& inv_scale, OptionalTensor const& found_inf, OptionalTensor const& norm,
             double max_norm, std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> const& checks,
             OptionalTensor const& gradient_norm) {
            OptionalTensor sum_squares, largest;
            if (checks) {
              std::tie(std::ignore, sum_squares, largest) = *checks;
            }
            std::string scaled;
            if (auto const* const bytes = std::get_if<py::bytes>(&scaled_by)) {
              scaled = *bytes;
            } else {
              for (int const one : std::get<std::vector<int>>(scaled_by)) {
                scaled.push_back(char(one));
              }
            }
            std::vector<at::Tensor> learning_rates;
            std::vector<Group> native;
            for (py::handle group : groups) {
              native.push_back(group_of(self.formula(), group, self.device(), learning_rates));
            }
            StepTable::Stepping const stepping(self);
            py::gil_scoped_release const no_gil;
            self.step(in(grads), scaled, native, inv_scale, found_inf, norm, max_norm, sum_squares, largest,
                      gradient_norm);
          },
          py::arg("grads"), py::arg("scaled"), py::arg("groups"), py::arg("inv_scale") = py::none(),
          py::arg("found_inf") = py::none(), py::arg("norm") = py::none(),
          py::arg("max_norm") = std::numeric_limits<double>::infinity(), py::arg("checks") = py::none(),
          py::arg("gradient_norm") = py::none());
}

}  // namespace amp_engine
