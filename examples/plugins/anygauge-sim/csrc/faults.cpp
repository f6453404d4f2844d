#include "faults.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace sim {
namespace {

// Never destroyed: threads may ask while the process ends.
Faults& faults() {
  static auto* found = new Faults();
  return *found;
}

bool has(const CollectiveCalls& calls, const std::string& name, uint64_t which) {
  const auto found = calls.find(name);
  return found != calls.end() && found->second.count(which);
}

}  // namespace

void inject(Faults given) { faults() = std::move(given); }

bool allocation_fails() {
  static std::atomic<uint64_t> count{0};
  return faults().allocations.count(++count);
}

CollectiveFault collective_fault(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, uint64_t> counts;
  const std::lock_guard<std::mutex> guard(mutex);
  CollectiveFault result = CollectiveFault::none;
  for (const std::string& key : {std::string("any"), name}) {  // the name goes before "any"
    const uint64_t which = ++counts[key];
    if (has(faults().hanging, key, which)) result = CollectiveFault::hang;
    if (has(faults().failing, key, which)) result = CollectiveFault::fail;
  }
  return result;
}

double slowness(int card) {
  const auto found = faults().slow.find(card);
  return found == faults().slow.end() ? 1.0 : found->second;
}

}  // namespace sim
