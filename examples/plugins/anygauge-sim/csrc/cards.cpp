#include "cards.h"

#include "faults.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace sim {
namespace {

struct Card {
  int number;
  int lock = -1;            // file descriptor
  int openings = 0;         // claims that were not given back
  bool given_back = false;  // by the last of them
  Memory memory;
  Counters counters;
};

struct Block {
  int index;
  size_t bytes;
};

// Never destroyed: tensors may be freed after static objects are.
struct Machine {
  std::mutex mutex;
  uint64_t capacity = 0;
  std::string locks;
  std::vector<Card> cards;
  std::unordered_map<const void*, Block> blocks;
  std::map<uintptr_t, size_t> ranges;  // start -> bytes, to find who owns an address within
  std::FILE* trace = nullptr;

  Card& card(int index) {
    TORCH_CHECK(
        index >= 0 && index < static_cast<int>(cards.size()), "sim:", index,
        " does not exist: this process sees ", cards.size(), " simulated cards");
    return cards[index];
  }
};

Machine& machine() {
  static Machine* found = new Machine();
  return *found;
}

thread_local int current = 0;

// The next two expect that the machine's mutex is held.

void take(const std::string& folder, Card& card) {
  if (card.lock >= 0 || folder.empty()) return;
  const std::string path = folder + "/card" + std::to_string(card.number);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  TORCH_CHECK(
      descriptor >= 0, "ANYGAUGE_SIM_LOCKS: cannot open ", path, ": ", std::strerror(errno));
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    ::close(descriptor);
    TORCH_CHECK(
        false, "sim card ", card.number, " is busy: another process holds it, and a card serves ",
        "one process at a time");
  }
  card.lock = descriptor;
}

void unlock_if_unused(Card& card) {
  if (card.lock < 0 || !card.given_back || card.memory.in_use) return;
  ::flock(card.lock, LOCK_UN);  // closing it would not do while a forked process has it too
  ::close(card.lock);
  card.lock = -1;
}

}  // namespace

void configure(
    const std::vector<int>& numbers, uint64_t capacity, const std::string& locks,
    const std::string& trace) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  TORCH_CHECK(all.cards.empty(), "the simulated cards of this process are configured already");
  if (!trace.empty()) {
    all.trace = std::fopen(trace.c_str(), "a");
    TORCH_CHECK(all.trace, "ANYGAUGE_SIM_TRACE: cannot write ", trace, ": ", std::strerror(errno));
  }
  all.capacity = capacity;
  all.locks = locks;
  for (const int each : numbers) all.cards.push_back({each});
}

int visible_cards() noexcept { return static_cast<int>(machine().cards.size()); }

uint64_t capacity() { return machine().capacity; }

int card_number(int index) { return machine().card(index).number; }

void claim(int index) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Card& card = all.card(index);
  take(all.locks, card);
  ++card.openings;
  card.given_back = false;
}

void give_back(int index) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Card& card = all.card(index);
  if (card.openings && --card.openings) return;
  card.given_back = true;
  unlock_if_unused(card);
}

void* allocate(int index, size_t bytes) {
  if (!bytes) {
    machine().card(index);
    return nullptr;
  }
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Card& card = all.card(index);
  take(all.locks, card);
  const bool refused = allocation_fails();
  const uint64_t free = all.capacity - card.memory.in_use;
  if (refused || bytes > free) {
    ++card.memory.out_of_memory;
    unlock_if_unused(card);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim card ", card.number, " is out of memory: ", bytes,
        " bytes were asked for, ", refused ? "and refused on purpose (ANYGAUGE_SIM_FAULTS); " : "",
        free, " of ", all.capacity, " are free, ", card.memory.in_use, " in use");
  }
  void* pointer = nullptr;
  TORCH_CHECK(
      ::posix_memalign(&pointer, 64, bytes) == 0, "the host has no ", bytes,
      " bytes for sim card ", card.number);
  // What was never written is no number, as on a real device: NaN in every floating point type.
  std::memset(pointer, 0xff, bytes);
  card.memory.in_use += bytes;
  card.memory.allocated += bytes;
  card.memory.peak = std::max(card.memory.peak, card.memory.in_use);
  ++card.counters.allocations;
  all.blocks[pointer] = {index, bytes};
  all.ranges[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return pointer;
}

void release(void* pointer) {
  if (!pointer) return;
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.blocks.find(pointer);
  if (found == all.blocks.end()) return;
  Card& card = all.cards[found->second.index];
  card.memory.in_use -= found->second.bytes;
  card.memory.freed += found->second.bytes;
  all.ranges.erase(reinterpret_cast<uintptr_t>(pointer));
  all.blocks.erase(found);
  std::free(pointer);
  unlock_if_unused(card);
}

int card_of(const void* pointer) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  auto after = all.ranges.upper_bound(address);
  if (after == all.ranges.begin()) return -1;
  --after;
  if (address >= after->first + after->second) return -1;
  return all.blocks[reinterpret_cast<const void*>(after->first)].index;
}

Memory memory(int index) {
  const std::lock_guard<std::mutex> guard(machine().mutex);
  return machine().card(index).memory;
}

void reset_peak(int index) {
  const std::lock_guard<std::mutex> guard(machine().mutex);
  Memory& found = machine().card(index).memory;
  found.peak = found.in_use;
}

void count_kernel(int index, const std::string& name) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Card& card = all.card(index);
  ++card.counters.kernels;
  ++card.counters.operations[name];
  if (all.trace) std::fprintf(all.trace, "%d %s\n", card.number, name.c_str());
}

void count_copy(int from, int to, uint64_t bytes, bool waits) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (from < 0) {
    all.card(to).counters.host_to_card_bytes += bytes;
  } else if (to < 0) {
    Card& card = all.card(from);
    card.counters.card_to_host_bytes += bytes;
    ++card.counters.card_to_host_copies;
    card.counters.host_waits += waits;
    if (all.trace) {
      std::fprintf(all.trace, "%d copy_to_host %llu%s\n", card.number,
                   static_cast<unsigned long long>(bytes), waits ? " waits" : "");
    }
  } else {
    all.card(from).counters.card_to_card_bytes += bytes;
  }
}

void count_collective(int index, const std::string& name, uint64_t bytes) {
  Machine& all = machine();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Card& card = all.card(index);
  ++card.counters.collective_calls[name];
  card.counters.collective_bytes[name] += bytes;
  if (all.trace) {
    std::fprintf(
        all.trace, "%d simccl::%s %llu\n", card.number, name.c_str(),
        static_cast<unsigned long long>(bytes));
  }
}

Counters counters(int index) {
  const std::lock_guard<std::mutex> guard(machine().mutex);
  return machine().card(index).counters;
}

void reset_counters(int index) {
  const std::lock_guard<std::mutex> guard(machine().mutex);
  machine().card(index).counters = Counters();
}

int current_card() noexcept { return current; }

void set_current_card(int index) {
  machine().card(index);
  current = index;
}

}  // namespace sim
