// Shared by the device's parts: the generator behind a card's numbers, and storage that grows.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <optional>

namespace sim {

void register_hooks();

// The host generator that draws for a card: of the generator given, or else of the card's own.
at::Generator host_generator(const std::optional<at::Generator>& given, int index);

// Moves a storage to a block of another size; what fits is kept.
void resize_storage(const c10::Storage& storage, size_t bytes);

// A tensor of the host over a card's bytes; it keeps them alive.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace sim
