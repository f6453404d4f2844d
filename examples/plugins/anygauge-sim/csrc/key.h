// Torch's name for the cards: the key that it leaves to devices of others. With SIM_AS_CUDA, that of
// CUDA in a torch that is built without it: tests/standins/cuda lets programs for NVIDIA's cards run.
#pragma once

#include <c10/core/DeviceType.h>

#ifdef SIM_AS_CUDA
#include <ATen/detail/CUDAHooksInterface.h>
#define SIM_KEY CUDA
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#define SIM_KEY PrivateUse1
#endif

namespace sim {

constexpr auto kSim = c10::DeviceType::SIM_KEY;

#ifdef SIM_AS_CUDA
using HooksInterface = at::CUDAHooksInterface;
inline const HooksInterface& hooks() { return at::detail::getCUDAHooks(); }
#else
using HooksInterface = at::PrivateUse1HooksInterface;
inline const HooksInterface& hooks() { return at::detail::getPrivateUse1Hooks(); }
#endif

}  // namespace sim
