// Hears of what collectives of torch.distributed write. amp_engine/initialization/collectives.py says what for, and has the same in
// Python, where turning process groups into Python objects and back takes 100 us a call.
#pragma once

#include <torch/extension.h>

#include <string>
#include <vector>

namespace amp_engine {

// Calls `listener(tensors, is_broadcast)` after each of the operators of c10d that write, from now on, with what it writes:
// its first argument. These, and those that read, find memory that has been asked for. Never taken back: torch frees a
// kernel that another thread may be in.
void watch_collectives(std::vector<std::string> const& writing, std::vector<std::string> const& reading,
                       pybind11::object listener);

}  // namespace amp_engine
