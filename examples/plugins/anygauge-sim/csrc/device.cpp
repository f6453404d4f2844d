// What torch must know of a device: memory, streams and events, random numbers.
//
// Every operation has ended when its call returns, so a stream is only a number, and an event is
// the moment at which it was recorded.
#include "cards.h"
#include "device.h"
#include "key.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <unordered_map>

namespace sim {
namespace {

// -- memory of the cards --------------------------------------------------------------------

void free_card_memory(void* pointer) { release(pointer); }

struct CardAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_card();
    void* data = sim::allocate(index, bytes);
    return {data, data, &free_card_memory, c10::Device(kSim, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_card_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept back
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {capacity() - memory(index).in_use, capacity()};
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Memory now = memory(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                        &stats.requested_bytes}) {
      (*bytes)[all].current = static_cast<int64_t>(now.in_use);
      (*bytes)[all].peak = static_cast<int64_t>(now.peak);
      (*bytes)[all].allocated = static_cast<int64_t>(now.allocated);
      (*bytes)[all].freed = static_cast<int64_t>(now.freed);
    }
    stats.num_ooms = static_cast<int64_t>(now.out_of_memory);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
};

CardAllocator card_allocator;
REGISTER_ALLOCATOR(kSim, &card_allocator);

// -- pinned memory of the host --------------------------------------------------------------

std::mutex pinned_mutex;
std::unordered_map<const void*, size_t>& pinned() {
  static auto* found = new std::unordered_map<const void*, size_t>();
  return *found;
}

void free_pinned(void* pointer) {
  {
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned().erase(pointer);
  }
  std::free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(
        ::posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "the host has no ", bytes,
        " bytes to pin");
    const std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned()[data] = bytes;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator pinned_allocator;
REGISTER_HOST_ALLOCATOR(kSim, &pinned_allocator);

bool is_pinned(const void* data) {
  const std::lock_guard<std::mutex> guard(pinned_mutex);
  if (pinned().count(data)) return true;
  const auto address = reinterpret_cast<uintptr_t>(data);
  for (const auto& [start, bytes] : pinned()) {
    const auto from = reinterpret_cast<uintptr_t>(start);
    if (address >= from && address < from + bytes) return true;
  }
  return false;
}

// -- streams and events ---------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct Event {
  Clock::time_point moment;
};

thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> current_streams;

c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kSim, current_card()); }
  void setDevice(c10::Device device) const override { set_current_card(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < visible_cards()) set_current_card(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(visible_cards());
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto found = current_streams.find(device.index());
    return stream(device.index(), found == current_streams.end() ? 0 : found->second);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    const auto index = device.index() < 0 ? current_card() : device.index();
    return stream(index, next++);
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    const c10::Stream before = getStream(wanted.device());
    current_streams[wanted.device_index()] = wanted.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(
      void** event, const c10::Stream&, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->moment = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "elapsed_time: both events must have been recorded");
    return std::chrono::duration<double, std::milli>(
               static_cast<Event*>(second)->moment - static_cast<Event*>(first)->moment)
        .count();
  }
};

C10_REGISTER_GUARD_IMPL(SIM_KEY, Guard);

// -- random numbers -------------------------------------------------------------------------

// A generator of the card: its numbers come from a generator of the host that is its own.
struct CardGenerator final : c10::GeneratorImpl {
  explicit CardGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl(
            c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::SIM_KEY)),
        inner(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override {
    auto* copy = new CardGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }

  at::Generator inner;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int each = 0; each < visible_cards(); ++each) {
      made->push_back(at::make_generator<CardGenerator>(static_cast<c10::DeviceIndex>(each)));
    }
    return made;
  }();
  if (index < 0) index = static_cast<c10::DeviceIndex>(current_card());
  TORCH_CHECK(
      index < static_cast<c10::DeviceIndex>(all->size()), "sim:", static_cast<int>(index),
      " does not exist");
  return (*all)[index];
}

// -- hooks ----------------------------------------------------------------------------------

struct Hooks final : HooksInterface {
#ifdef SIM_AS_CUDA
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return visible_cards(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
#else
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
#endif
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible_cards() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(visible_cards());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_card(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_card());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_card(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int index = card_of(data);
    TORCH_CHECK(index >= 0, "the address is on no simulated card");
    return c10::Device(kSim, static_cast<c10::DeviceIndex>(index));
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<CardGenerator>(
        index < 0 ? static_cast<c10::DeviceIndex>(current_card()) : index);
  }
};

#ifdef SIM_AS_CUDA
using CUDAHooks = Hooks;  // the name that torch looks for
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
#endif

}  // namespace

#ifdef SIM_AS_CUDA
void register_hooks() {}  // torch asks its registry, once
#else
void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
#endif

at::Generator host_generator(const std::optional<at::Generator>& given, int index) {
  const at::Generator& chosen = given.has_value() && given->defined()
      ? *given
      : default_generator(static_cast<c10::DeviceIndex>(index));
  auto* impl = dynamic_cast<CardGenerator*>(chosen.unsafeGetGeneratorImpl());
  TORCH_CHECK(
      impl, "expected a generator of device type sim, but found one of ", chosen.device());
  TORCH_CHECK(
      impl->device().index() == index, "the generator is of ", impl->device(), ", the tensor of ",
      c10::Device(kSim, static_cast<c10::DeviceIndex>(index)));
  return impl->inner;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceIndex index = storage.device().index();
  void* data = sim::allocate(index, bytes);
  c10::DataPtr fresh{data, data, &free_card_memory, c10::Device(kSim, index)};
  if (bytes && impl->nbytes()) {
    std::memcpy(data, impl->data(), std::min(bytes, impl->nbytes()));
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace sim
