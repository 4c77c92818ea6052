// Kernels for operators of torch that write memory without torch's usual check of who else owns it.
// amp_engine/initialization/collectives.py gives the reasons. It does the same for collectives in Python, where
// converting process groups to Python objects and back takes 100 us per call.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace amp_engine {

// From now on, calls `listener(tensors, is_broadcast)` after each of the `writing` operators of c10d. `tensors` is what
// the operator has written: its first argument. Before each `writing` or `reading` operator, requests the memory of its
// tensors. Never removed, because torch frees the kernel, and another thread may be running it.
void watch_collectives(std::vector<std::string> const& writing, std::vector<std::string> const& reading,
                       pybind11::object listener);

// From now on, torch's operators on lists (`_foreach_mul_`, `_fused_adam_`) request the memory that they write. Their
// GPU kernels take it as memory that is only read (ATen/native/cuda/MultiTensorApply.cuh): no materializer is called,
// and a write into copy-on-write memory reaches all its owners. Never removed, for the same reason as above.
void ask_for_written_lists();

}  // namespace amp_engine
