// Faults on purpose, for tests of what a program does when a card fails.
//
// ANYGAUGE_SIM_FAULTS holds them, separated by commas:
//   oom@N            the Nth allocation of this process is refused
//   fail:NAME@N      the Nth collective of that name (or "any") raises
//   hang:NAME@N      the Nth collective of that name never ends
//   slow:CARD@F      the card takes F times as long for every operation
#pragma once

#include <cstdint>
#include <string>

namespace sim {

bool allocation_fails();  // counts an allocation
enum class CollectiveFault { none, fail, hang };
CollectiveFault collective_fault(const std::string& name);  // counts a collective
double slowness(int card);  // 1 is as fast as the host

}  // namespace sim
