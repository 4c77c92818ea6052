// The arguments of a call from CPython, some of them replaced by casts.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace amp_engine::patch {

namespace py = pybind11;

// The C function of a builtin or method of torch that takes a tuple and a dictionary. Calling it directly avoids the
// usual call of CPython, which would unpack both and then build them again.
struct Direct {
  PyCFunctionWithKeywords function = nullptr;  // null: call the object
  PyObject* self = nullptr;                    // of a builtin; a method gets its own self
};

inline PyObject* float32_object() {
  static PyObject* const object = py::cast(at::kFloat).release().ptr();
  return object;
}

// {"dtype": torch.float32}. bind() makes it, not its first use: making a dictionary may start a garbage collection,
// which may run Python, and other threads would wait for a function's static variable with the GIL held.
inline PyObject* only_float32 = nullptr;

inline bool is_dtype(PyObject* keyword) {
  return PyUnicode_GET_LENGTH(keyword) == 5 && PyUnicode_CompareWithASCIIString(keyword, "dtype") == 0;
}

// The arguments of a call, with casts in the place of some.
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

  // Holds a second reference to each tensor until the call has ended. Without it, the first reference besides that of
  // the Python object would come and go inside of the call, where the GIL is released, and torch would take the GIL to
  // count the references of the object.
  void hold() {
    for (size_t i = 0; i < size_; ++i) {
      if (THPVariable_CheckExact(args_[i]) && THPVariable_Unpack(args_[i]).use_count() == 1) {
        held_.push_back(THPVariable_Unpack(args_[i]));
      }
    }
  }

  // Steals the reference to `object`.
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

// Arguments of METH_FASTCALL: a tuple has the names of the last arguments.
class FastArguments : public Arguments {
 public:
  FastArguments(PyObject* self, PyObject* const* args, size_t positional, PyObject* names)
      : Arguments(positional + (self != nullptr), positional + (self != nullptr) + (names ? Py_SIZE(names) : 0)),
        names_(names) {
    args_ = args;
    if (self) {  // a method descriptor gets self apart from the other arguments
      PyObject** copy = room();
      copy[0] = self;
      std::memcpy(copy + 1, args, (size_ - 1) * sizeof(PyObject*));
      args_ = copy;
    }
  }

  PyObject* name(size_t i) const { return i < positional_ ? nullptr : PyTuple_GET_ITEM(names_, i - positional_); }
  PyObject* call(PyObject* callable) const { return PyObject_Vectorcall(callable, args_, positional_, names_); }
  PyObject* call_original(PyObject* original, Direct const&) const { return call(original); }

  // Replaces dtype=None by dtype=torch.float32. Returns true if there was a dtype=None.
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

// A tuple of references. Like CPython's zip, it reuses the tuple of an earlier call with the same size, which has only
// None between calls. Needs the GIL.
class SpareTuple {
 public:
  SpareTuple(PyObject* const* items, size_t size) : size_(size) {
    if (size < spare.size() && spare[size] && Py_REFCNT(spare[size]) == 1) {
      tuple_ = std::exchange(spare[size], nullptr);
      if (!PyObject_GC_IsTracked(tuple_)) {  // a garbage collection untracked it, because it had only None
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
    PyObject* const discarded = keep ? std::exchange(spare[size_], tuple_) : tuple_;
    Py_XDECREF(discarded);
  }

  PyObject* get() const { return tuple_; }

 private:
  PyObject*& at(size_t i) const { return reinterpret_cast<PyTupleObject*>(tuple_)->ob_item[i]; }

  static inline std::array<PyObject*, 6> spare{};

  size_t size_;
  PyObject* tuple_ = nullptr;
};

// Arguments of METH_VARARGS: a tuple and a dictionary. If nothing was cast, both are passed on unchanged.
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

  // Adds dtype=torch.float32, except if there is a positional None, which may be the dtype. Returns true if added.
  bool ask_for_float32() {
    asks_ = std::find(args_, args_ + positional_, Py_None) == args_ + positional_;
    return asks_;
  }

  PyObject* call_original(PyObject*, Direct const& original) const {
    PyObject* const self = self_ ? args_[0] : original.self;
    if (asks_) {
      return original.function(self, tuple_, asking().ptr());
    }
    if (!any_cast()) {
      return original.function(self, tuple_, dict_);
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
    return original.function(self, tuple.get(), dict.ptr());
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
    if (!dict_) {
      return py::reinterpret_borrow<py::object>(only_float32);
    }
    auto dict = py::reinterpret_steal<py::object>(PyDict_Copy(dict_));
    PyDict_Update(dict.ptr(), only_float32);
    return dict;
  }

  PyObject *self_, *tuple_, *dict_;
  bool asks_ = false;
  c10::SmallVector<PyObject*, 4> names_;
};

}  // namespace amp_engine::patch
