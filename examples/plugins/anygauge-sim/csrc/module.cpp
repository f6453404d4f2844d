// The Python module anygauge_sim._C.
#include "cards.h"
#include "device.h"
#include "faults.h"
#include "key.h"
#include "simccl.h"

#include <c10/core/DeviceType.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Simulated accelerator cards for torch.";
  module.def("register_hooks", &sim::register_hooks);
  module.def(
      "configure", &sim::configure, py::arg("cards"), py::arg("capacity"), py::arg("locks"),
      py::arg("trace"));
  module.def(
      "inject",
      [](std::set<uint64_t> allocations, sim::CollectiveCalls failing,
         sim::CollectiveCalls hanging, std::map<int, double> slow) {
        sim::inject({std::move(allocations), std::move(failing), std::move(hanging),
                     std::move(slow)});
      },
      py::arg("allocations"), py::arg("failing"), py::arg("hanging"), py::arg("slow"));
  module.def("device_count", &sim::visible_cards);
  module.def("capacity", &sim::capacity);
  module.def("card_number", &sim::card_number);
  module.def("claim", &sim::claim);
  module.def("give_back", &sim::give_back);
  module.def("current_device", &sim::current_card);
  module.def("set_device", &sim::set_current_card);
  module.def("memory", [](int index) {
    const sim::Memory found = sim::memory(index);
    py::dict result;
    result["in_use"] = found.in_use;
    result["peak"] = found.peak;
    result["allocated"] = found.allocated;
    result["freed"] = found.freed;
    result["out_of_memory"] = found.out_of_memory;
    return result;
  });
  module.def("reset_peak", &sim::reset_peak);
  module.def("counters", [](int index) {
    const sim::Counters found = sim::counters(index);
    py::dict result;
    result["kernels"] = found.kernels;
    result["host_to_card_bytes"] = found.host_to_card_bytes;
    result["card_to_host_bytes"] = found.card_to_host_bytes;
    result["card_to_host_copies"] = found.card_to_host_copies;
    result["host_waits"] = found.host_waits;
    result["card_to_card_bytes"] = found.card_to_card_bytes;
    result["allocations"] = found.allocations;
    result["operations"] = found.operations;
    result["collective_calls"] = found.collective_calls;
    result["collective_bytes"] = found.collective_bytes;
    return result;
  });
  module.def("reset_counters", &sim::reset_counters);
  module.def("default_generator", [](int index) {
    return sim::hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(index));
  });
#ifdef SIM_AS_CUDA
  // Torch's own way to resize a storage asks for a build with CUDA.
  module.def("resize_storage", [](const at::Tensor& whole, size_t bytes) {
    sim::resize_storage(whole.storage(), bytes);
  });
#endif
  sim::bind_simccl(module);
}
