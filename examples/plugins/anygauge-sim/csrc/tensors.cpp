// Operations that make, describe or copy memory of the cards; all others are in kernels.cpp.
#include "cards.h"
#include "device.h"
#include "views.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace sim {
namespace {

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
      size, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::SIM_KEY),
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
      size, stride, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::SIM_KEY),
      c10::dtype_or_default(dtype));
}

// What resize_ does on every device: a tensor that has the shape keeps its strides, one without
// elements needs no bytes, and storage grows but never shrinks.
void reshape(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::IntArrayRef> stride) {
  if (self.sizes() == size && (!stride || self.strides() == *stride)) return;
  auto* impl = self.unsafeGetTensorImpl();
  const size_t item = self.dtype().itemsize();
  const size_t needed = stride
      ? at::detail::computeStorageNbytes(size, *stride, item, self.storage_offset())
      : at::detail::computeStorageNbytesContiguous(size, item, self.storage_offset());
  const bool empty = c10::multiply_integers(size) == 0;
  // First, for it may find no memory: no tensor may be larger than its storage.
  if (!empty && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  if (stride) {
    impl->set_sizes_and_strides(size, *stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  reshape(self, size, std::nullopt);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  const c10::DimVector strides =
      stride.data() ? c10::DimVector(stride) : c10::contiguous_strides(size);
  at::native::checkSetStorage<int64_t>(self, std::move(source), offset, size, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape(self, size, strides);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, source, 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kSim), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  const int from_card = on_card(self) ? self.device().index() : -1;
  const int to_card = on_card(to) ? to.device().index() : -1;
  TORCH_CHECK(
      (from_card >= 0 || self.device().is_cpu()) && (to_card >= 0 || to.device().is_cpu()),
      "cannot copy from ", self.device(), " to ", to.device());
  const int where = to_card >= 0 ? to_card : from_card;
  count_kernel(where, "aten::_copy_from");
  if (from_card != to_card) {
    // A card copies to the host by itself into pinned memory alone.
    const bool waits = to_card < 0 && !(non_blocking && to.is_pinned());
    count_copy(from_card, to_card, self.nbytes(), waits);
  }
  const Pace pace(where);
  Views views;
  at::Tensor target = to_card >= 0 ? views.of(to) : to;
  target.copy_(from_card >= 0 ? views.of(self) : self);
  return to;
}

#ifdef SIM_AS_CUDA
// Torch's own copy_ hands only devices of others to _copy_from.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool late) {
  copy_from(from, self, late);
  return self;
}
#endif

// As elsewhere, the number may be on another device than what it fills.
at::Tensor& fill_with(at::Tensor& self, const at::Tensor& value) {
  TORCH_CHECK(value.dim() == 0, "fill_: the value has ", value.dim(), " dimensions; it takes none");
  return self.copy_(self.is_alias_of(value) ? value.clone() : value);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_kernel(self.device().index(), "aten::_local_scalar_dense");
  count_copy(self.device().index(), -1, self.nbytes(), true);
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

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("fill_.Tensor", TORCH_FN(fill_with));
#ifdef SIM_AS_CUDA
  m.impl("copy_", TORCH_FN(copy_));
#endif
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(shallow_copy_type));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("is_set_to", TORCH_FN(is_set_to));
}

}  // namespace
}  // namespace sim
