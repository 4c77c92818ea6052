// Operators of torch that write past its own check of who has memory. amp_engine/initialization/collectives.py says what for, and
// has the same for collectives in Python, where turning process groups into Python objects and back takes 100 us a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace amp_engine {

// Calls `listener(tensors, is_broadcast)` after each of the operators of c10d that write, from now on, with what it writes:
// its first argument. These, and those that read, find memory that has been asked for. Never taken back: torch frees a
// kernel that another thread may be in.
void watch_collectives(std::vector<std::string> const& writing, std::vector<std::string> const& reading,
                       pybind11::object listener);

// Has torch's operators on lists (`_foreach_mul_`, `_fused_adam_`) ask for the memory that they write, from now on. Their
// kernels for GPUs take it as memory that is only read (ATen/native/cuda/MultiTensorApply.cuh): nobody is told, and what is
// copied on write is written for all who have it. Never taken back, as above.
void ask_for_written_lists();

}  // namespace amp_engine
