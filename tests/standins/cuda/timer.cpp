// DDP's timer for CUDA, which torch has in a build with CUDA alone. Every operation of the cards has
// ended when its call returns, so the host's clock tells what the device's events would.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace c10d {
namespace {

class HostTimer final : public Timer {
 public:
  explicit HostTimer(c10::Device) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to == kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)

}  // namespace
}  // namespace c10d
