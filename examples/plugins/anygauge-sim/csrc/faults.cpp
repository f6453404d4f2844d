#include "faults.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

namespace sim {
namespace {

struct Faults {
  uint64_t allocation = 0;  // 0: none
  std::map<std::string, std::pair<uint64_t, CollectiveFault>> collectives;
  std::map<int, double> slow;

  Faults() {
    const char* text = std::getenv("ANYGAUGE_SIM_FAULTS");
    std::stringstream list(text ? text : "");
    std::string item;
    while (std::getline(list, item, ',')) {
      const auto at = item.find('@');
      TORCH_CHECK(at != std::string::npos, complaint(item));
      const std::string what = item.substr(0, at), value = item.substr(at + 1);
      const auto colon = what.find(':');
      const std::string kind = what.substr(0, colon);
      const std::string name = colon == std::string::npos ? "" : what.substr(colon + 1);
      try {
        if (what == "oom") {
          allocation = std::stoull(value);
        } else if (kind == "fail" && !name.empty()) {
          collectives[name] = {std::stoull(value), CollectiveFault::fail};
        } else if (kind == "hang" && !name.empty()) {
          collectives[name] = {std::stoull(value), CollectiveFault::hang};
        } else if (kind == "slow" && !name.empty()) {
          slow[std::stoi(name)] = std::stod(value);
        } else {
          TORCH_CHECK(false, complaint(item));
        }
      } catch (const std::logic_error&) {  // of stoull and its like
        TORCH_CHECK(false, complaint(item));
      }
    }
  }

  static std::string complaint(const std::string& item) {
    return "ANYGAUGE_SIM_FAULTS: '" + item +
        "' is none of oom@N, fail:COLLECTIVE@N, hang:COLLECTIVE@N, slow:CARD@FACTOR";
  }
};

const Faults& faults() {
  static const Faults* found = new Faults();
  return *found;
}

}  // namespace

bool allocation_fails() {
  static std::atomic<uint64_t> count{0};
  const uint64_t which = ++count;
  return faults().allocation == which;
}

CollectiveFault collective_fault(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, uint64_t> counts;
  const std::lock_guard<std::mutex> guard(mutex);
  for (const std::string& key : {name, std::string("any")}) {
    const auto found = faults().collectives.find(key);
    if (found != faults().collectives.end() && ++counts[key] == found->second.first) {
      return found->second.second;
    }
  }
  return CollectiveFault::none;
}

double slowness(int card) {
  const auto found = faults().slow.find(card);
  return found == faults().slow.end() ? 1.0 : found->second;
}

}  // namespace sim
