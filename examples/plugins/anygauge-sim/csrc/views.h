// The bytes of a card as torch's CPU kernels see them, and how long a slow card takes.
#pragma once

#include "key.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <unordered_map>
#include <vector>

namespace sim {


inline bool on_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A card with a "slow" fault takes its factor longer for what is done within this object's life.
class Pace {
 public:
  explicit Pace(int index);
  ~Pace();

 private:
  double factor_;
  std::chrono::steady_clock::time_point began_;
};

// Tensors of the host over the bytes of a card's tensors, for the length of one call. Tensors that
// share a storage on the card share one here, so that kernels see what overlaps.
class Views {
 public:
  at::Tensor of(const at::Tensor& tensor);

  // The card's tensor that belongs to what a kernel returned.
  at::Tensor back(const at::Tensor& result, c10::Device device);

  // Gives the card's tensors the shapes, and if need be the room, that a kernel gave their views.
  void write_back();

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // the card's -> the host's
  std::unordered_map<c10::StorageImpl*, c10::Storage> keys_;      // the host's -> the card's
  std::unordered_map<c10::TensorImpl*, at::Tensor> given_;        // the card's -> its view
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;    // a view -> the card's
  std::vector<at::Tensor> kept_;
};

}  // namespace sim
