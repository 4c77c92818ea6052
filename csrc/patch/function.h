// A patched function: looks at its tensor arguments, casts, calls on.
#pragma once

#include <Python.h>

#include <pybind11/pybind11.h>

namespace amp_engine::patch {

// Adds WeightCache, patched_function, patched_method and the switches of the casts in force to the module.
void bind(pybind11::module_& m);

}  // namespace amp_engine::patch
