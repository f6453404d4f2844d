// Operations on the cards: the host's kernels run on the card's own bytes.
//
// Operations that make or describe memory are written out. All others go through one boxed
// function: it shows the card's bytes to torch's CPU kernel as if they were the host's, copies
// nothing in, and copies only those results out that the kernel made itself.
#include "cards.h"
#include "device.h"
#include "faults.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <chrono>
#include <thread>
#include <unordered_map>

namespace sim {
namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

bool on_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A card with a "slow" fault takes its factor longer for whatever is done within this object's life.
class Pace {
 public:
  explicit Pace(int index)
      : factor_(slowness(card_number(index))), began_(std::chrono::steady_clock::now()) {}
  ~Pace() {
    if (factor_ <= 1) return;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    std::this_thread::sleep_for(took * (factor_ - 1));
  }

 private:
  double factor_;
  std::chrono::steady_clock::time_point began_;
};

// Tensors of the host over the bytes of a card's tensors, for the length of one call. Tensors that
// share a storage on the card share one here, so that kernels see what overlaps.
class Views {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      // An empty storage may be given bytes by an operation that resizes its result.
      const bool empty = storage->nbytes() == 0;
      c10::DataPtr data = empty
          ? c10::DataPtr(nullptr, c10::DeviceType::CPU)
          : c10::DataPtr(
                storage->mutable_data(), new c10::Storage(tensor.storage()),
                [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::DeviceType::CPU);
      c10::Storage host(
          c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data),
          empty ? c10::GetAllocator(c10::DeviceType::CPU) : nullptr, empty);
      found = storages_.emplace(storage, std::move(host)).first;
    }
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = view.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.is_conj()) impl->_set_conj(true);
    if (tensor.is_neg()) impl->_set_neg(true);
    originals_.emplace(impl, tensor);
    kept_.push_back(view);  // so that no other tensor gets its address during the call
    keys_.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    return view;
  }

  // The card's tensor that belongs to what a kernel returned.
  at::Tensor back(const at::Tensor& result, c10::Device device) {
    if (!result.defined() || result.device().type() != c10::DeviceType::CPU) return result;
    const auto same = originals_.find(result.unsafeGetTensorImpl());
    if (same != originals_.end()) return same->second;
    const auto shared = keys_.find(result.storage().unsafeGetStorageImpl());
    if (shared != keys_.end()) {  // a view of an argument
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(shared->second), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
          result.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      return view;
    }
    at::Tensor made = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(device));
    Views mine;
    mine.of(made).copy_(result);
    return made;
  }

  // An operation may have resized an argument that it writes to.
  void write_back() {
    for (const at::Tensor& grown : kept_) {
      const at::Tensor& original = originals_.at(grown.unsafeGetTensorImpl());
      if (original.storage().nbytes() != 0 || grown.numel() == 0) continue;
      original.resize_(grown.sizes());
      Views mine;
      mine.of(original).copy_(grown);
    }
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::vector<at::Tensor> kept_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> keys_;
};

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

  void see(const at::Tensor& tensor, bool in_list = false) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == c10::DeviceType::CPU &&
        (tensor.dim() == 0 || (host_indices_ && in_list))) {
      return;
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
  auto arguments = torch::jit::last(*stack, count);
  const size_t first = stack->size() - count;

  Devices devices(op);
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      devices.see(value.toTensor());
    } else if (is_tensor_list(value)) {
      for (const at::Tensor& each : value.toTensorVector()) devices.see(each, true);
    } else if (is_optional_tensor_list(value)) {
      for (const c10::IValue& each : value.toListRef()) {
        if (each.isTensor()) devices.see(each.toTensor(), true);
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

// -- what is written out --------------------------------------------------------------------

c10::Device chosen(std::optional<c10::Device> device) {
  const c10::Device wanted = device.value_or(c10::Device(kSim));
  return wanted.has_index()
      ? wanted
      : c10::Device(kSim, static_cast<c10::DeviceIndex>(current_card()));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only tensors of the host can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim has strided tensors only");
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only tensors of the host can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim has strided tensors only");
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto storage = self.storage();
  impl->set_sizes_contiguous(size);
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.dtype().itemsize(), self.storage_offset());
  if (needed > storage.nbytes()) resize_storage(storage, needed);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "set_: the storage is on ", source.device(),
      ", the tensor on ", self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  const size_t needed =
      at::detail::computeStorageNbytes(size, self.strides(), self.dtype().itemsize(), offset);
  if (needed > source.nbytes()) resize_storage(source, needed);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, source, 0, {elements}, {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (self.numel() == 0) return to;
  const int from_card = on_card(self) ? self.device().index() : -1;
  const int to_card = on_card(to) ? to.device().index() : -1;
  TORCH_CHECK(
      (from_card >= 0 || self.device().is_cpu()) && (to_card >= 0 || to.device().is_cpu()),
      "cannot copy from ", self.device(), " to ", to.device());
  const int where = to_card >= 0 ? to_card : from_card;
  count_kernel(where, "aten::_copy_from");
  if (from_card != to_card) count_copy(from_card, to_card, self.nbytes());
  const Pace pace(where);
  Views views;
  at::Tensor target = to_card >= 0 ? views.of(to) : to;
  target.copy_(from_card >= 0 ? views.of(self) : self);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_kernel(self.device().index(), "aten::_local_scalar_dense");
  count_copy(self.device().index(), -1, self.nbytes());
  Views views;
  return views.of(self).item();
}

bool shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  // `tensor.data = another` may move a tensor between host and card, as for other devices.
  return self.layout() == from.layout();
}

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;  // plain arithmetic: the cards have no fused attention
}

void record_stream(at::Tensor&, c10::Stream) {}  // a call has ended when it returns

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}
at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(shallow_copy_type));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("is_set_to", TORCH_FN(is_set_to));
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

at::Tensor host_view(const at::Tensor& tensor) {
  Views views;
  return views.of(tensor);
}

}  // namespace sim
