#include "function.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "cast.h"
#include "weight_cache.h"

#ifdef AMP_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace py = pybind11;

namespace amp_engine::patch {
namespace {

// What is done to the arguments; amp_engine/casting/wrappers.py has one function of this name for each.
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

// The C function of a builtin or a method of torch's that takes a tuple and a dictionary: called without CPython's own
// way there, which would take both apart and make them again.
struct Direct {
  PyCFunctionWithKeywords function = nullptr;  // none: call the object
  PyObject* self = nullptr;                    // of a builtin; a method gets its own
};

struct Function {
  PyObject* original;   // called on
  PyObject* reference;  // the Python wrapper, for what is out of the ordinary here
  Direct direct;        // into `original`
  std::string name, doc, module;
  Kind kind;
  bool torch_promotes;  // of Kind::promote: torch itself gives the widest type, but for 0-dim tensors
  bool is_matmul;       // which passes its arguments on as others, even where no graph is made
  PyMethodDef definition;
};

// The casts in force. Read and written under the GIL.
struct Casts {
  bool on = false;        // else every function is the original
  bool observed = false;  // every call goes through Python, which tells of it
  bool caching = false;
  at::ScalarType low = at::kHalf;
  WeightCache* cache = nullptr;
  py::object owner;  // of `cache`
};
Casts& casts = *new Casts;  // for good: Python is gone when globals are destroyed

// amp_engine/casting/float_region.py: where nothing is cast in this thread.
bool in_float_region() {
  return !at::autocast::is_autocast_cache_enabled() && at::autocast::get_autocast_dtype(at::kCPU) == at::kFloat;
}

PyObject* float32_object() {
  static PyObject* const object = py::cast(at::kFloat).release().ptr();
  return object;
}

bool is_dtype(PyObject* keyword) {
  return PyUnicode_GET_LENGTH(keyword) == 5 && PyUnicode_CompareWithASCIIString(keyword, "dtype") == 0;
}

// Arguments of a call, and those that were cast in their place.
class Arguments {
 public:
  Arguments(Arguments const&) = delete;
  ~Arguments() {
    for (PyObject* object : owned_) {
      Py_DECREF(object);
    }
  }

  size_t size() const { return size_; }
  size_t positional() const { return positional_; }
  PyObject* operator[](size_t i) const { return args_[i]; }

  // A second reference to each tensor, until the call has ended. A first one beside the Python object's that comes and
  // goes inside of the call, where the GIL is released, has torch take it to count the object's references.
  void hold() {
    for (size_t i = 0; i < size_; ++i) {
      if (THPVariable_CheckExact(args_[i]) && THPVariable_Unpack(args_[i]).use_count() == 1) {
        held_.push_back(THPVariable_Unpack(args_[i]));
      }
    }
  }

  // Steals `object`.
  void set(size_t i, PyObject* object) {
    owned_.push_back(object);
    if (args_ != few_.data() && args_ != many_.data()) {
      PyObject** copy = room();
      std::memcpy(copy, args_, size_ * sizeof(PyObject*));
      args_ = copy;
    }
    const_cast<PyObject**>(args_)[i] = object;
  }

 protected:
  Arguments(size_t positional, size_t size) : positional_(positional), size_(size) {}

  PyObject** room() {
    if (size_ <= few_.size()) {
      return few_.data();
    }
    many_.resize(size_);
    return many_.data();
  }

  bool any_cast() const { return !owned_.empty(); }

  size_t positional_, size_;
  PyObject* const* args_ = nullptr;

 private:
  std::array<PyObject*, 12> few_;
  std::vector<PyObject*> many_;
  c10::SmallVector<PyObject*, 6> owned_;
  c10::SmallVector<at::Tensor, 6> held_;
};

// As METH_FASTCALL has them: the names of the last ones in a tuple.
class FastArguments : public Arguments {
 public:
  FastArguments(PyObject* self, PyObject* const* args, size_t positional, PyObject* names)
      : Arguments(positional + (self != nullptr), positional + (self != nullptr) + (names ? Py_SIZE(names) : 0)),
        names_(names) {
    args_ = args;
    if (self) {  // a method descriptor gets it apart from the rest
      PyObject** copy = room();
      copy[0] = self;
      std::memcpy(copy + 1, args, (size_ - 1) * sizeof(PyObject*));
      args_ = copy;
    }
  }

  PyObject* name(size_t i) const { return i < positional_ ? nullptr : PyTuple_GET_ITEM(names_, i - positional_); }
  PyObject* call(PyObject* callable) const { return PyObject_Vectorcall(callable, args_, positional_, names_); }
  PyObject* call_original(Function const& function) const { return call(function.original); }

  // Passes dtype=torch.float32 in place of dtype=None. Whether there was that.
  bool ask_for_float32() {
    for (size_t i = positional_; i < size_; ++i) {
      if (is_dtype(name(i)) && args_[i] == Py_None) {
        set(i, Py_NewRef(float32_object()));
        return true;
      }
    }
    return false;
  }

 private:
  PyObject* names_;
};

// A tuple of references, which is kept for later calls of as many, with None in it, as CPython's zip does. Under the GIL.
class SpareTuple {
 public:
  SpareTuple(PyObject* const* items, size_t size) : size_(size) {
    if (size < spare.size() && spare[size] && Py_REFCNT(spare[size]) == 1) {
      tuple_ = std::exchange(spare[size], nullptr);
      if (!PyObject_GC_IsTracked(tuple_)) {  // a collection that found nothing but None in it
        PyObject_GC_Track(tuple_);
      }
    } else if (!(tuple_ = PyTuple_New(Py_ssize_t(size)))) {
      throw py::error_already_set();
    }
    for (size_t i = 0; i < size; ++i) {
      Py_XDECREF(std::exchange(at(i), Py_NewRef(items[i])));
    }
  }
  SpareTuple(SpareTuple const&) = delete;
  ~SpareTuple() {
    bool const keep = size_ < spare.size() && Py_REFCNT(tuple_) == 1;
    for (size_t i = 0; keep && i < size_; ++i) {
      Py_DECREF(std::exchange(at(i), Py_NewRef(Py_None)));
    }
    PyObject* const dropped = keep ? std::exchange(spare[size_], tuple_) : tuple_;
    Py_XDECREF(dropped);
  }

  PyObject* get() const { return tuple_; }

 private:
  PyObject*& at(size_t i) const { return reinterpret_cast<PyTupleObject*>(tuple_)->ob_item[i]; }

  static inline std::array<PyObject*, 6> spare{};

  size_t size_;
  PyObject* tuple_ = nullptr;
};

// As METH_VARARGS has them: a tuple and a dictionary, handed on as they are where nothing was cast.
class TupleArguments : public Arguments {
 public:
  TupleArguments(PyObject* self, PyObject* tuple, PyObject* dict)
      : Arguments(size_t(Py_SIZE(tuple)) + (self != nullptr),
                  size_t(Py_SIZE(tuple)) + (self != nullptr) + (dict ? size_t(PyDict_GET_SIZE(dict)) : 0)),
        self_(self),
        tuple_(tuple),
        dict_(dict) {
    args_ = reinterpret_cast<PyTupleObject*>(tuple)->ob_item;
    if (size_ != size_t(Py_SIZE(tuple))) {
      PyObject** copy = room();
      copy[0] = self;
      std::memcpy(copy + (self != nullptr), args_, size_t(Py_SIZE(tuple)) * sizeof(PyObject*));
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      for (size_t i = positional_; i < size_; ++i) {
        PyDict_Next(dict, &position, &key, copy + i);
        names_.push_back(key);
      }
      args_ = copy;
    }
  }

  PyObject* name(size_t i) const { return i < positional_ ? nullptr : names_[i - positional_]; }

  PyObject* call(PyObject* callable) const {
    py::object const names = dict_ ? names_in_a_tuple() : py::object();
    return PyObject_Vectorcall(callable, args_, positional_, names.ptr());
  }

  // Passes dtype=torch.float32. Not beside a None that may stand for it by position.
  bool ask_for_float32() {
    asks_ = std::find(args_, args_ + positional_, Py_None) == args_ + positional_;
    return asks_;
  }

  PyObject* call_original(Function const& function) const {
    PyObject* const self = self_ ? args_[0] : function.direct.self;
    if (asks_) {
      return function.direct.function(self, tuple_, asking().ptr());
    }
    if (!any_cast()) {
      return function.direct.function(self, tuple_, dict_);
    }
    size_t const first = self_ != nullptr;
    SpareTuple const tuple(args_ + first, positional_ - first);
    py::object dict;
    if (dict_) {
      dict = py::reinterpret_steal<py::object>(PyDict_Copy(dict_));
      for (size_t i = positional_; i < size_; ++i) {
        PyDict_SetItem(dict.ptr(), name(i), args_[i]);
      }
    }
    return function.direct.function(self, tuple.get(), dict.ptr());
  }

 private:
  py::tuple names_in_a_tuple() const {
    py::tuple tuple(names_.size());
    for (size_t i = 0; i < names_.size(); ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), Py_NewRef(names_[i]));
    }
    return tuple;
  }

  py::object asking() const {
    static PyObject* const only = py::dict(py::arg("dtype") = py::handle(float32_object())).release().ptr();
    if (!dict_) {
      return py::reinterpret_borrow<py::object>(only);
    }
    auto dict = py::reinterpret_steal<py::object>(PyDict_Copy(dict_));
    PyDict_Update(dict.ptr(), only);
    return dict;
  }

  PyObject *self_, *tuple_, *dict_;
  bool asks_ = false;
  c10::SmallVector<PyObject*, 4> names_;
};

bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

// An exact list or tuple: its items.
PyObject** items(PyObject* sequence, size_t& count) {
  count = size_t(Py_SIZE(sequence));
  return PyList_CheckExact(sequence) ? reinterpret_cast<PyListObject*>(sequence)->ob_item
                                     : reinterpret_cast<PyTupleObject*>(sequence)->ob_item;
}

// What a look at the arguments finds.
struct Found {
  bool odd = false;  // Python must see to it: subclasses, nested tensors, `out`, sequences of unusual types
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

// The type that a function is told to compute in, as softmax(x, dtype=...) is, if it is one that is cast.
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

// Whether it is told any, by name or position.
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
      return;  // of numbers
    } else {
      found.odd = true;
    }
  }
}

bool is_number_or_text(PyObject* object) {
  return PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || object == Py_None ||
         PyBool_Check(object);
}

// At what is no exact tensor.
void look_at(PyObject* arg, Found& found) {
  if (is_sequence(arg)) {
    look_at_items(arg, found);
  } else {
    static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
    found.odd |= PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(arg)), name) != 0;  // a tensor, or takes its part
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

// Whether tensors are not what they seem, or calls of theirs are watched: function and dispatch modes, functorch,
// torch.jit.trace.
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
  if (!weight.is_cuda()) {
    return true;
  }
#ifdef AMP_WITH_CUDA  // a captured graph would take the copy for a constant
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

// `object`, an exact tensor, in type `to`: a new reference, or null if it is of that type or of one that is never cast.
PyObject* cast_object(PyObject* object, at::ScalarType to, bool weights) {
  at::Tensor const& tensor = THPVariable_Unpack(object);
  at::ScalarType const type = tensor.scalar_type();
  if (type == to || !is_castable(type)) {
    return nullptr;
  }
  if (weights && type == at::kFloat && reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass &&
      may_keep(tensor)) {
    if (PyObject* const found = casts.cache->find(tensor, to)) {
      return found;
    }
    py::object const alive = casts.owner;
    return casts.cache->cast(tensor, to).tensor.release().ptr();
  }
  if (tensor.is_cpu() && tensor.numel() <= 8192) {  // a microsecond: to let others run would take a tenth more
    return THPVariable_Wrap(cast(tensor, to));
  }
  at::Tensor result;
  {
    py::gil_scoped_release const no_gil;
    result = cast(tensor, to);
  }
  return THPVariable_Wrap(std::move(result));
}

PyObject* cast_items(PyObject* sequence, at::ScalarType to, bool weights) {
  size_t count;
  PyObject** tensors = items(sequence, count);
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    if (!THPVariable_CheckExact(tensors[i])) {
      return nullptr;
    }
    at::ScalarType const type = THPVariable_Unpack(tensors[i]).scalar_type();
    if (!at::isFloatingType(type)) {
      return nullptr;
    }
    any |= type != to && is_castable(type);
  }
  if (!any) {
    return nullptr;
  }
  bool const is_list = PyList_CheckExact(sequence);
  auto result =
      py::reinterpret_steal<py::object>(is_list ? PyList_New(Py_ssize_t(count)) : PyTuple_New(Py_ssize_t(count)));
  for (size_t i = 0; i < count; ++i) {
    // A cast lets other threads run, which may shorten a list.
    if (size_t(Py_SIZE(sequence)) != count) {
      throw py::value_error("a list of tensors changed its length while it was cast");
    }
    auto const item = py::reinterpret_borrow<py::object>(items(sequence, count)[i]);
    PyObject* cast = cast_object(item.ptr(), to, weights);
    cast = cast ? cast : Py_NewRef(item.ptr());
    is_list ? PyList_SET_ITEM(result.ptr(), Py_ssize_t(i), cast) : PyTuple_SET_ITEM(result.ptr(), Py_ssize_t(i), cast);
  }
  return result.release().ptr();
}

void cast_all(Arguments& args, size_t begin, at::ScalarType to, bool weights) {
  for (size_t i = begin; i < args.size(); ++i) {
    PyObject* const arg = args[i];
    PyObject* cast = nullptr;
    if (THPVariable_CheckExact(arg)) {
      cast = cast_object(arg, to, weights);
    } else if (PyList_CheckExact(arg) || PyTuple_CheckExact(arg)) {
      cast = cast_items(arg, to, weights);
    }
    if (cast) {
      args.set(i, cast);
    }
  }
}

template <class A>
PyObject* call(Function const& function, A& args) {
  if (!casts.on || in_float_region()) {
    return args.call_original(function);
  }
  if (casts.observed || has_modes()) {
    return args.call(function.reference);
  }
  Found const found = look(args);
  if (found.odd) {
    return args.call(function.reference);
  }
  switch (function.kind) {
    case Kind::half:
      if (auto const type = dtype_argument(args)) {
        cast_all(args, 0, *type, false);
      } else if (found.float32 || (casts.low == at::kHalf ? found.bfloat16 : found.half)) {
        cast_all(args, 0, casts.low, casts.caching);
      }
      break;
    case Kind::float32:
      if (auto const type = dtype_argument(args)) {
        cast_all(args, 0, *type, false);
      } else if (found.any_low()) {
        cast_all(args, 0, at::kFloat, false);
      }
      break;
    case Kind::float32_by_dtype:
      if (found.any_low() && !told_dtype(args) && !args.ask_for_float32()) {
        cast_all(args, 0, at::kFloat, false);
      }
      break;
    case Kind::promote:
      if (found.mixed() && (!function.torch_promotes || found.scalar)) {
        cast_all(args, 0, at::kFloat, false);
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
        cast_all(args, 1, type, false);
      }
      break;
    }
  }
  if (function.is_matmul || (found.autograd && c10::GradMode::is_enabled())) {  // the graph will save some
    args.hold();
  }
  return args.call_original(function);
}

// HANDLE_TH_ERRORS without its buffer for warnings, which the function that is called on has, too.
template <class F>
PyObject* guarded(F f) {
  try {
    return f();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// --- functions of modules: builtins, whose `__self__` is this object ----------------------------------------------

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

// A builtin is pickled as getattr(__self__, __name__): its __self__ as the module, so that this loads without us.
PyObject* reduce(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  py::object const import = py::module_::import("importlib").attr("import_module");
  auto const& module = reinterpret_cast<FunctionObject*>(self)->function->module;
  return py::make_tuple(import, py::make_tuple(module)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef reduce_methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_methods, reduce_methods},
                       {Py_tp_doc, const_cast<char*>("What a patched function of a module is bound to.")},
                       {0, nullptr}};
PyType_Spec spec{"amp_engine._C.PatchedFunction", sizeof(FunctionObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyTypeObject* function_type = nullptr;

// --- methods of torch.Tensor: method descriptors, which are told of `self` only; a C function each ------------------

std::deque<Function> functions;  // for good, as the patched functions are made once in a process
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

// One of each for every method; the two above are not inlined into a thousand of them, which takes minutes to compile.
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

// The way into `original`, if it is a builtin (or a method, where patched as one) that takes tuple and dictionary.
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

// `fast` takes arguments as METH_FASTCALL, `direct` as METH_VARARGS has them.
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
  py::class_<WeightCache>(m, "WeightCache", "Low-precision copies of weights; see amp_engine.casting.cache.")
      .def(py::init<>())
      .def("__len__", &WeightCache::size)
      .def(
          "cast",
          [](WeightCache& self, at::Tensor const& weight, at::ScalarType low) {
            auto cast = self.cast(weight, low);
            return py::make_tuple(std::move(cast.tensor), cast.was_made);
          },
          py::arg("weight"), py::arg("dtype"))
      .def("discard", &WeightCache::discard)
      .def("lapse", &WeightCache::lapse)
      .def("drop_orphans", &WeightCache::drop_orphans)
      .def("clear", &WeightCache::clear)
      .def("copies", &WeightCache::copies)
      .def("written", &WeightCache::written);
  m.def("patched_function", &patched_function, py::arg("original"), py::arg("reference"), py::arg("name"),
        py::arg("doc"), py::arg("module"), py::arg("kind"), py::arg("torch_promotes"),
        "A builtin that casts the arguments of `original`.");
  m.def("patched_method", &patched_method, py::arg("original"), py::arg("reference"), py::arg("name"), py::arg("doc"),
        py::arg("kind"), py::arg("torch_promotes"),
        "A method descriptor of torch.Tensor that casts the arguments of `original`; None when all are given out.");
  m.def(
      "put_in_force",
      [](at::ScalarType low, py::object cache, bool caching, bool observed) {
        auto* const native = cache.cast<WeightCache*>();
        casts = {true, observed, caching, low, native, std::move(cache)};
      },
      py::arg("dtype"), py::arg("cache"), py::arg("caching"), py::arg("observed"), "What patched functions do now.");
  m.def("put_out_of_force", [] { casts = {}; }, "Patched functions are the originals.");
}

}  // namespace amp_engine::patch
