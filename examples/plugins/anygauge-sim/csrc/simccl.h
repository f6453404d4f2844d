// The cards' collective library, in the form that torch.distributed asks for.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

void bind_simccl(pybind11::module_& module);

}  // namespace sim
