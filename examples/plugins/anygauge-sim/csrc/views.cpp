#include "views.h"

#include "cards.h"
#include "device.h"
#include "faults.h"

#include <ATen/ATen.h>

#include <thread>

namespace sim {

Pace::Pace(int index)
    : factor_(slowness(card_number(index))), began_(std::chrono::steady_clock::now()) {}

Pace::~Pace() {
  if (factor_ <= 1) return;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  std::this_thread::sleep_for(took * (factor_ - 1));
}

at::Tensor Views::of(const at::Tensor& tensor) {
  // One that is given twice stays one: kernels ask whether their result is their input.
  const auto given = given_.find(tensor.unsafeGetTensorImpl());
  if (given != given_.end()) return given->second;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(storage);
  if (found == storages_.end()) {
    c10::DataPtr data = storage->nbytes() == 0
        ? c10::DataPtr(nullptr, c10::DeviceType::CPU)
        : c10::DataPtr(
              storage->mutable_data(), new c10::Storage(tensor.storage()),
              [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::DeviceType::CPU);
    // A kernel that needs more room for its result gets it on the host; `write_back` moves it.
    c10::Storage host(
        c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data),
        c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
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
  given_.emplace(tensor.unsafeGetTensorImpl(), view);
  kept_.push_back(view);  // so that no other tensor gets its address during the call
  keys_.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
  return view;
}

at::Tensor Views::back(const at::Tensor& result, c10::Device device) {
  if (!result.defined() || result.device().type() != c10::DeviceType::CPU) return result;
  const auto same = originals_.find(result.unsafeGetTensorImpl());
  if (same != originals_.end()) return same->second;
  const auto shared = keys_.find(result.storage().unsafeGetStorageImpl());
  if (shared != keys_.end()) {  // a view of an argument
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(shared->second), c10::DispatchKeySet(c10::DispatchKey::SIM_KEY),
        result.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
    return view;
  }
  at::Tensor made =
      at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
  Views mine;
  mine.of(made).copy_(result);
  return made;
}

void Views::write_back() {
  for (const at::Tensor& view : kept_) {
    const at::Tensor& original = originals_.at(view.unsafeGetTensorImpl());
    const c10::Storage& host = view.storage();
    const c10::Storage& card = original.storage();
    TORCH_CHECK(
        keys_.count(host.unsafeGetStorageImpl()),
        "the operation put another storage under a tensor, which simulated cards do not support");
    const bool moved = host.data() != card.data();  // for lack of room
    if (host.nbytes() > card.nbytes()) resize_storage(card, host.nbytes());
    if (view.sizes() != original.sizes() || view.strides() != original.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
    }
    if (moved) {
      Views mine;
      mine.of(original).copy_(view);
    }
  }
}

at::Tensor host_view(const at::Tensor& tensor) {
  Views views;
  return views.of(tensor);
}

}  // namespace sim
