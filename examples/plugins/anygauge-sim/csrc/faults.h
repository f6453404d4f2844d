// Faults on purpose, for tests of what a program does when a card fails.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace sim {

// Name of a collective, or "any" -> which of its calls, from 1.
using CollectiveCalls = std::map<std::string, std::set<uint64_t>>;

// As anygauge_sim/settings.py has read and checked them.
struct Faults {
  std::set<uint64_t> allocations;  // those that are refused, from 1
  CollectiveCalls failing;
  CollectiveCalls hanging;
  std::map<int, double> slow;  // card's number -> times as long for every operation
};

void inject(Faults faults);  // once per process, before any card is used

bool allocation_fails();  // counts an allocation
enum class CollectiveFault { none, fail, hang };
CollectiveFault collective_fault(const std::string& name);  // counts a collective
double slowness(int card);  // 1 is as fast as the host

}  // namespace sim
