#include "function.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cast.h"
#include "ops.h"
#include "weight_cache.h"

namespace py = pybind11;

namespace amp_engine::patch {
namespace {

// The treatment of the arguments. amp_engine/casting/wrappers.py has a function of the same name for each.
enum class Kind : char {
  half,
  float32,
  float32_by_dtype,
  promote,
  match_self,
  refused_function,
  refused_method,
  banned
};
char const* const kKinds[] = {"half",       "float32",          "float32_by_dtype", "promote",
                              "match_self", "refused_function", "refused_method",   "banned"};

struct Function {
  PyObject* original;   // the unpatched function
  PyObject* reference;  // the Python wrapper, for unusual arguments
  Direct direct;        // C function of `original`
  std::string name, doc, module;
  Kind kind;
  bool torch_promotes;  // of Kind::promote: torch itself promotes to the widest type, except for 0-dim tensors
  bool is_matmul;       // passes its arguments on as other tensors, even if no graph is made
  PyMethodDef definition;
};

// The casts in force. The GIL protects them.
struct Casts {
  bool on = false;        // false: every function is the original
  bool observed = false;  // every call goes through Python, which reports it
  bool caching = false;
  bool everywhere = true;  // false: only in cast regions
  at::ScalarType low = at::kHalf;
  WeightCache* cache = nullptr;
  py::object owner;  // of `cache`
};
Casts& casts = *new Casts;  // never destroyed: Python is gone when globals are destroyed

// The type of CPU autocast marks the float and cast regions of this thread: amp_engine/casting/regions.py.
bool casts_here() {
  at::ScalarType const region = at::autocast::get_autocast_dtype(at::kCPU);
  return casts.everywhere ? region != at::kFloat : region == at::kDouble;
}

bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

// The items of an exact list or tuple.
PyObject** items(PyObject* sequence, size_t& count) {
  count = size_t(Py_SIZE(sequence));
  return PyList_CheckExact(sequence) ? reinterpret_cast<PyListObject*>(sequence)->ob_item
                                     : reinterpret_cast<PyTupleObject*>(sequence)->ob_item;
}

// The properties of a call's arguments.
struct Found {
  bool odd = false;  // needs the Python wrapper: subclasses, nested tensors, `out`, sequences of unusual types
  bool float32 = false, half = false, bfloat16 = false, wide = false, scalar = false;
  bool autograd = false;  // a graph may be made

  bool any_low() const { return half || bfloat16; }
  bool mixed() const { return float32 + half + bfloat16 > 1 && !wide; }

  void note(at::Tensor const& tensor) {
    at::ScalarType const type = tensor.scalar_type();
    if (!at::isFloatingType(type)) {
      return;
    }
    odd |= tensor.is_nested();
    autograd |= tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
    float32 |= type == at::kFloat;
    half |= type == at::kHalf;
    bfloat16 |= type == at::kBFloat16;
    wide |= !is_castable(type);
    scalar |= tensor.dim() == 0;
  }
};

// The `dtype` keyword of a call, as in softmax(x, dtype=...), if that type is castable.
template <class A>
std::optional<at::ScalarType> dtype_argument(A const& args) {
  for (size_t i = args.positional(); i < args.size(); ++i) {
    if (THPDtype_Check(args[i]) && is_dtype(args.name(i))) {
      at::ScalarType const type = reinterpret_cast<THPDtype*>(args[i])->scalar_type;
      return is_castable(type) ? std::optional(type) : std::nullopt;
    }
  }
  return std::nullopt;
}

// True if the call has any dtype, by name or position.
template <class A>
bool told_dtype(A const& args) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (THPDtype_Check(args[i])) {
      return true;
    }
  }
  return false;
}

bool is_out(PyObject* keyword) {
  return keyword != nullptr && PyUnicode_GET_LENGTH(keyword) == 3 &&
         PyUnicode_CompareWithASCIIString(keyword, "out") == 0;
}

void look_at_items(PyObject* sequence, Found& found) {
  if (Py_SIZE(sequence) == 0) {
    return;
  }
  if (!PyList_CheckExact(sequence) && !PyTuple_CheckExact(sequence)) {
    PyObject* const first = PyList_Check(sequence) ? PyList_GET_ITEM(sequence, 0) : PyTuple_GET_ITEM(sequence, 0);
    found.odd |= THPVariable_Check(first);
    return;
  }
  size_t count;
  PyObject** const tensors = items(sequence, count);
  for (size_t i = 0; i < count; ++i) {
    if (THPVariable_CheckExact(tensors[i])) {
      found.note(THPVariable_Unpack(tensors[i]));
    } else if (i == 0 && !THPVariable_Check(tensors[i])) {
      return;  // a sequence of numbers
    } else {
      found.odd = true;
      return;
    }
  }
}

bool is_number_or_text(PyObject* object) {
  return PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || object == Py_None ||
         PyBool_Check(object);
}

// For objects that are not exact tensors.
void look_at(PyObject* arg, Found& found) {
  if (is_sequence(arg)) {
    look_at_items(arg, found);
  } else {
    static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
    found.odd |= PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(arg)), name) != 0;  // a tensor, or acts as one
  }
}

template <class A>
Found look(A const& args) {
  Found found;
  for (size_t i = 0; i < args.size(); ++i) {
    PyObject* const arg = args[i];
    if (THPVariable_CheckExact(arg)) {
      found.odd |= is_out(args.name(i));
      found.note(THPVariable_Unpack(arg));
    } else if (!is_number_or_text(arg)) {
      look_at(arg, found);
    }
  }
  return found;
}

// True if tensors may be wrappers, or if calls are traced: function and dispatch modes, functorch, torch.jit.trace.
bool has_modes() {
  constexpr c10::DispatchKeySet odd{c10::DispatchKey::Python,
                                    c10::DispatchKey::PythonTLSSnapshot,
                                    c10::DispatchKey::PythonDispatcher,
                                    c10::DispatchKey::PreDispatch,
                                    c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                    c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                    c10::DispatchKey::Functionalize,
                                    c10::DispatchKey::Tracer};
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(odd) || at::impl::torch_function_mode_enabled();
}

bool may_keep(at::Tensor const& weight) {
  if (weight.is_inference() || weight.layout() != at::kStrided) {
    return false;
  }
  // A captured graph would treat the copy as a constant.
  return !weight.is_cuda() || (has_cuda() && !is_captured(weight.device()));
}

// Casts `object`, an exact tensor, to type `to`. Returns a new reference, or null if it has this type or one that is
// never cast. If there is a `cache`, weights are looked up there.
PyObject* cast_object(PyObject* object, at::ScalarType to, WeightCache* cache) {
  at::Tensor const& tensor = THPVariable_Unpack(object);
  at::ScalarType const type = tensor.scalar_type();
  if (type == to || !is_castable(type)) {
    return nullptr;
  }
  if (cache && type == at::kFloat && reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass &&
      may_keep(tensor)) {
    if (PyObject* const found = cache->find(tensor, to)) {
      return found;
    }
    return cache->cast(tensor, to).tensor.release().ptr();
  }
  // The cast takes a microsecond, or is a launch. Releasing the GIL would take a tenth more.
  if (tensor.is_cuda() || (tensor.is_cpu() && tensor.numel() <= 8192)) {
    return THPVariable_Wrap(cast(tensor, to));
  }
  at::Tensor const held = tensor;  // torch.utils.swap_tensors in another thread may take the tensor from the object
  at::Tensor result;
  {
    py::gil_scoped_release const no_gil;
    result = cast(held, to);
  }
  return THPVariable_Wrap(std::move(result));
}

PyObject* cast_items(PyObject* sequence, at::ScalarType to, WeightCache* cache) {
  size_t count;
  PyObject** const given = items(sequence, count);
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    if (!THPVariable_CheckExact(given[i])) {
      return nullptr;
    }
    at::ScalarType const type = THPVariable_Unpack(given[i]).scalar_type();
    if (!at::isFloatingType(type)) {
      return nullptr;
    }
    any |= type != to && is_castable(type);
  }
  if (!any) {
    return nullptr;
  }
  // During a cast other threads may change a list, and garbage collections may see a result that is not complete.
  c10::SmallVector<py::object, 8> tensors;
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(py::reinterpret_borrow<py::object>(given[i]));
  }
  for (py::object& tensor : tensors) {
    if (PyObject* const cast = cast_object(tensor.ptr(), to, cache)) {
      tensor = py::reinterpret_steal<py::object>(cast);
    }
  }
  bool const is_list = PyList_CheckExact(sequence);
  PyObject* const result = is_list ? PyList_New(Py_ssize_t(count)) : PyTuple_New(Py_ssize_t(count));
  for (size_t i = 0; result && i < count; ++i) {
    PyObject* const tensor = tensors[i].release().ptr();
    is_list ? PyList_SET_ITEM(result, Py_ssize_t(i), tensor) : PyTuple_SET_ITEM(result, Py_ssize_t(i), tensor);
  }
  return result ? result : throw py::error_already_set();
}

void cast_all(Arguments& args, size_t begin, at::ScalarType to, WeightCache* cache = nullptr) {
  for (size_t i = begin; i < args.size(); ++i) {
    PyObject* const arg = args[i];
    PyObject* cast = nullptr;
    if (THPVariable_CheckExact(arg)) {
      cast = cast_object(arg, to, cache);
    } else if (PyList_CheckExact(arg) || PyTuple_CheckExact(arg)) {
      cast = cast_items(arg, to, cache);
    }
    if (cast) {
      args.set(i, cast);
    }
  }
}

template <class A>
PyObject* call(Function const& function, A& args) {
  if (!casts.on || !casts_here()) {
    return args.call_original(function.original, function.direct);
  }
  if (casts.observed || has_modes()) {
    return args.call(function.reference);
  }
  Found const found = look(args);
  if (!casts.on) {  // no longer: the check of a type may run Python
    return args.call_original(function.original, function.direct);
  }
  if (found.odd) {
    return args.call(function.reference);
  }
  switch (function.kind) {
    case Kind::half:
      if (auto const type = dtype_argument(args)) {
        cast_all(args, 0, *type);
      } else if (found.float32 || (casts.low == at::kHalf ? found.bfloat16 : found.half)) {
        // During a cast other threads may put other casts, or none, in force. This call keeps the cache that it began
        // with.
        py::object const owner = casts.owner;
        cast_all(args, 0, casts.low, casts.caching ? casts.cache : nullptr);
      }
      break;
    case Kind::float32:
      if (auto const type = dtype_argument(args)) {
        cast_all(args, 0, *type);
      } else if (found.any_low()) {
        cast_all(args, 0, at::kFloat);
      }
      break;
    case Kind::float32_by_dtype:
      if (found.any_low() && !told_dtype(args) && !args.ask_for_float32()) {
        cast_all(args, 0, at::kFloat);
      }
      break;
    case Kind::promote:
      if (found.mixed() && (!function.torch_promotes || found.scalar)) {
        cast_all(args, 0, at::kFloat);
      }
      break;
    case Kind::refused_function:
      if (found.half) {
        return args.call(function.reference);
      }
      break;
    case Kind::banned:
      if (found.any_low()) {
        return args.call(function.reference);
      }
      break;
    case Kind::refused_method:
    case Kind::match_self: {
      at::ScalarType const type = THPVariable_Unpack(args[0]).scalar_type();
      if (function.kind == Kind::refused_method && type == at::kHalf) {
        return args.call(function.reference);
      }
      if (is_castable(type)) {
        cast_all(args, 1, type);
      }
      break;
    }
  }
  if (function.is_matmul || (found.autograd && c10::GradMode::is_enabled())) {  // the graph will save some arguments
    args.hold();
  }
  return args.call_original(function.original, function.direct);
}

// HANDLE_TH_ERRORS without its buffer for warnings, because the called function has one, too.
template <class F>
PyObject* guarded(F f) {
  try {
    return f();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// --- functions of modules: builtins whose `__self__` is this object -----------------------------------------------

struct FunctionObject {
  PyObject_HEAD
  Function* function;
};

PyObject* call_function(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  return guarded([&] {
    FastArguments arguments(nullptr, args, size_t(positional), names);
    return call(*reinterpret_cast<FunctionObject*>(self)->function, arguments);
  });
}

PyObject* call_direct_function(PyObject* self, PyObject* tuple, PyObject* dict) {
  return guarded([&] {
    TupleArguments arguments(nullptr, tuple, dict);
    return call(*reinterpret_cast<FunctionObject*>(self)->function, arguments);
  });
}

// A builtin is pickled as getattr(__self__, __name__). This pickles __self__ as the module, so loading needs no
// extension.
PyObject* reduce(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  py::object const import = py::module_::import("importlib").attr("import_module");
  auto const& module = reinterpret_cast<FunctionObject*>(self)->function->module;
  return py::make_tuple(import, py::make_tuple(module)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef reduce_methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_methods, reduce_methods},
                       {Py_tp_doc, const_cast<char*>("The object that a patched function of a module is bound to.")},
                       {0, nullptr}};
PyType_Spec spec{"amp_engine._C.PatchedFunction", sizeof(FunctionObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyTypeObject* function_type = nullptr;

// --- methods of torch.Tensor: method descriptors, which get no object but `self`, so each has its own C function ----

std::deque<Function> functions;  // never destroyed: patched functions are made once per process
std::array<Function*, 512> methods{};
size_t method_count = 0;

[[gnu::noinline]] PyObject* call_method(Function const& function, PyObject* self, PyObject* const* args,
                                        Py_ssize_t positional, PyObject* names) {
  return guarded([&] {
    FastArguments arguments(self, args, size_t(positional), names);
    return call(function, arguments);
  });
}

[[gnu::noinline]] PyObject* call_direct_method(Function const& function, PyObject* self, PyObject* tuple,
                                               PyObject* dict) {
  return guarded([&] {
    TupleArguments arguments(self, tuple, dict);
    return call(function, arguments);
  });
}

// One of each for every method. The two functions above are not inlined: a thousand copies take minutes to compile.
template <size_t i>
PyObject* thunk(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  return call_method(*methods[i], self, args, positional, names);
}
template <size_t i>
PyObject* direct_thunk(PyObject* self, PyObject* tuple, PyObject* dict) {
  return call_direct_method(*methods[i], self, tuple, dict);
}

template <class F>
PyCFunction c_function(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <size_t... i>
std::array<std::pair<PyCFunction, PyCFunction>, sizeof...(i)> thunks_of(std::index_sequence<i...>) {
  return {std::pair{c_function(&thunk<i>), c_function(&direct_thunk<i>)}...};
}

// The C function of `original`, if it takes a tuple and a dictionary. `original` must be a builtin, or a method
// descriptor if it is patched as a method.
Direct direct_into(PyObject* original, bool as_method) {
  auto const takes = [](PyMethodDef const* method) {
    return (method->ml_flags & ~(METH_STATIC | METH_CLASS)) == (METH_VARARGS | METH_KEYWORDS);
  };
  auto const function = [](PyMethodDef const* method) {
    return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(method->ml_meth));
  };
  if (!as_method && PyCFunction_CheckExact(original)) {
    auto const* const method = reinterpret_cast<PyCFunctionObject*>(original)->m_ml;
    return takes(method) ? Direct{function(method), PyCFunction_GET_SELF(original)} : Direct{};
  }
  if (as_method && Py_IS_TYPE(original, &PyMethodDescr_Type)) {
    auto const* const method = reinterpret_cast<PyMethodDescrObject*>(original)->d_method;
    return takes(method) ? Direct{function(method), nullptr} : Direct{};
  }
  return {};
}

Function& make(py::object original, py::object reference, std::string name, std::string doc, std::string module,
               std::string const& kind, bool torch_promotes, bool as_method) {
  size_t i = 0;
  while (i < std::size(kKinds) && kind != kKinds[i]) {
    ++i;
  }
  if (i == std::size(kKinds)) {
    throw py::value_error("kind is '" + kind + "', but must be the name of a wrapper of amp_engine.casting.wrappers.");
  }
  Direct const direct = direct_into(original.ptr(), as_method);
  bool const is_matmul = name.find("matmul") != std::string::npos;
  return functions.emplace_back(Function{original.release().ptr(), reference.release().ptr(), direct, std::move(name),
                                         std::move(doc), std::move(module), Kind(i), torch_promotes, is_matmul, {}});
}

// `fast` has the arguments of METH_FASTCALL, `direct` those of METH_VARARGS.
void define(Function& f, PyCFunction fast, PyCFunction direct) {
  bool const is_direct = f.direct.function != nullptr;
  f.definition = {f.name.c_str(), is_direct ? direct : fast, (is_direct ? METH_VARARGS : METH_FASTCALL) | METH_KEYWORDS,
                  f.doc.c_str()};
}

py::object patched_function(py::object original, py::object reference, std::string name, std::string doc,
                            std::string module, std::string const& kind, bool torch_promotes) {
  Function& f = make(std::move(original), std::move(reference), std::move(name), std::move(doc), std::move(module),
                     kind, torch_promotes, false);
  define(f, c_function(&call_function), c_function(&call_direct_function));
  auto* const self = PyObject_New(FunctionObject, function_type);
  self->function = &f;
  py::object const owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&f.definition, owned.ptr(), py::str(f.module).ptr()));
}

py::object patched_method(py::object original, py::object reference, std::string name, std::string doc,
                          std::string const& kind, bool torch_promotes) {
  if (method_count == methods.size()) {
    return py::none();
  }
  Function& f = make(std::move(original), std::move(reference), std::move(name), std::move(doc), "torch", kind,
                     torch_promotes, true);
  static auto const thunks = thunks_of(std::make_index_sequence<std::tuple_size_v<decltype(methods)>>());
  define(f, thunks[method_count].first, thunks[method_count].second);
  methods[method_count++] = &f;
  return py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(THPVariableClass), &f.definition));
}

}  // namespace

void bind(py::module_& m) {
  function_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  only_float32 = py::dict(py::arg("dtype") = py::handle(float32_object())).release().ptr();
  py::class_<WeightCache>(m, "WeightCache", "Half casts of weights; see amp_engine.casting.cache.")
      .def(py::init<>())
      .def(
          "cast",
          [](WeightCache& self, at::Tensor const& weight, at::ScalarType low) {
            auto cast = self.cast(weight, low);
            return py::make_tuple(std::move(cast.tensor), cast.was_made);
          },
          py::arg("weight"), py::arg("dtype"))
      .def("kept", &WeightCache::kept)
      .def("clear", &WeightCache::clear);
  m.def("patched_function", &patched_function, py::arg("original"), py::arg("reference"), py::arg("name"),
        py::arg("doc"), py::arg("module"), py::arg("kind"), py::arg("torch_promotes"),
        "A builtin that casts the arguments of `original`.");
  m.def("patched_method", &patched_method, py::arg("original"), py::arg("reference"), py::arg("name"), py::arg("doc"),
        py::arg("kind"), py::arg("torch_promotes"),
        "A method descriptor of torch.Tensor that casts the arguments of `original`; None when all are given out.");
  m.def(
      "put_in_force",
      [](at::ScalarType low, py::object cache, bool caching, bool observed, bool everywhere) {
        auto* const native = cache.cast<WeightCache*>();
        casts = {true, observed, caching, everywhere, low, native, std::move(cache)};
      },
      py::arg("dtype"), py::arg("cache"), py::arg("caching"), py::arg("observed"), py::arg("everywhere"),
      "Sets the behaviour of patched functions.");
  m.def("put_out_of_force", [] { casts = {}; }, "Patched functions are the originals.");
}

}  // namespace amp_engine::patch
