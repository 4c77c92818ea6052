// A patched function checks its tensor arguments, casts them, and calls the original.
#pragma once

#include <Python.h>

#include <pybind11/pybind11.h>

namespace amp_engine::patch {

// Adds WeightCache, patched_function, patched_method, put_in_force and put_out_of_force to the module.
void bind(pybind11::module_& m);

}  // namespace amp_engine::patch
