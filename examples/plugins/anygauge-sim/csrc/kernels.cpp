// Operations on the cards: the host's kernels run on the card's own bytes.
//
// One boxed function serves all operations that are not written out in tensors.cpp: it shows the
// card's bytes to torch's CPU kernel as if they were the host's, copies nothing in, and copies only
// those results out that the kernel made itself.
#include "cards.h"
#include "device.h"
#include "views.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

namespace sim {
namespace {

// Finds the card of an operation's tensors and refuses others.
class Devices {
 public:
  explicit Devices(const c10::OperatorHandle& op) : op_(op) {
    const std::string& name = op.schema().name();
    // As on other devices: indices may be the host's.
    host_indices_ = name == "aten::index" || name == "aten::index_put_" ||
        name == "aten::index_put" || name == "aten::_index_put_impl_" ||
        name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
  }

  void see(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return;
    if (tensor.device().is_cpu()) {
      // A number of the host is read on its way to the card; a result would have to wait for it.
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      const bool index = host_indices_ && argument.name() == "indices";
      if (index || (tensor.dim() == 0 && !written)) return;
    }
    see(tensor.device());
  }
  void see(c10::Device device) {
    if (device.type() == kSim && !device.has_index()) {
      device = c10::Device(kSim, static_cast<c10::DeviceIndex>(current_card()));
    }
    TORCH_CHECK(
        !found_ || *found_ == device, op_.schema().name(),
        ": expected all tensors to be on the same device, but found at least two devices, ",
        *found_, " and ", device, "!");
    found_ = device;
  }
  c10::Device device() const {
    const c10::Device device =
        found_.value_or(c10::Device(kSim, static_cast<c10::DeviceIndex>(current_card())));
    TORCH_CHECK(
        device.type() == kSim, op_.schema().name(), ": no tensor is on a simulated card, but on ",
        device);
    return device;
  }

 private:
  const c10::OperatorHandle& op_;
  bool host_indices_ = false;
  std::optional<c10::Device> found_;
};

bool is_tensor_list(const c10::IValue& value) { return value.isTensorList(); }

bool is_optional_tensor_list(const c10::IValue& value) {
  return value.isList() &&
      value.toList().elementType()->isSubtypeOf(*c10::getTypePtr<std::optional<at::Tensor>>());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;

  Devices devices(op);
  for (size_t at = first; at < stack->size(); ++at) {
    const c10::IValue& value = (*stack)[at];
    const c10::Argument& argument = schema.arguments()[at - first];
    if (value.isTensor()) {
      devices.see(value.toTensor(), argument);
    } else if (is_tensor_list(value)) {
      for (const at::Tensor& each : value.toTensorVector()) devices.see(each, argument);
    } else if (is_optional_tensor_list(value)) {
      for (const c10::IValue& each : value.toListRef()) {
        if (each.isTensor()) devices.see(each.toTensor(), argument);
      }
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      devices.see(value.toDevice());
    }
  }
  const c10::Device device = devices.device();
  const int index = device.index();
  count_kernel(index, schema.name());
  const Pace pace(index);

  Views views;
  const auto view = [&](const at::Tensor& tensor) {
    return on_card(tensor) ? views.of(tensor) : tensor;
  };
  const bool draws = schema.name() == "aten::native_dropout";
  bool generator_given = false;
  for (size_t at = first; at < stack->size(); ++at) {
    c10::IValue& value = (*stack)[at];
    if (value.isTensor()) {
      value = view(value.toTensor());
    } else if (is_tensor_list(value)) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(view(each));
      value = all;
    } else if (is_optional_tensor_list(value)) {
      c10::List<std::optional<at::Tensor>> all;
      for (const c10::IValue& each : value.toListRef()) {
        all.push_back(
            each.isTensor() ? std::optional<at::Tensor>(view(each.toTensor())) : std::nullopt);
      }
      value = all;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (schema.arguments()[at - first].name() == "generator") {
      value = host_generator(
          value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator()), index);
      generator_given = true;
    }
  }

  const auto run = [&] {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  };
  if (draws && !generator_given) {
    // A kernel that takes no generator draws from the host's own: lend it the card's numbers.
    at::Generator host = at::detail::getDefaultCPUGenerator();
    at::Generator card = host_generator(std::nullopt, index);
    const at::Tensor kept = host.get_state();
    host.set_state(card.get_state());
    try {
      run();
    } catch (...) {
      host.set_state(kept);
      throw;
    }
    card.set_state(host.get_state());
    host.set_state(kept);
  } else {
    run();
  }
  views.write_back();

  const size_t results = schema.returns().size();
  for (size_t at = stack->size() - results; at < stack->size(); ++at) {
    c10::IValue& value = (*stack)[at];
    if (value.isTensor()) {
      value = views.back(value.toTensor(), device);
    } else if (is_tensor_list(value)) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(views.back(each, device));
      value = all;
    }
  }
}

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  // Elsewhere than on the host these are taken apart into others, and their digits differ.
  for (const char* name :
       {"_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims",
        "any.dims_out", "linalg__powsum", "mish_backward", "native_channel_shuffle",
        "native_dropout", "native_dropout_backward", "native_group_norm", "native_layer_norm",
        "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace
}  // namespace sim
