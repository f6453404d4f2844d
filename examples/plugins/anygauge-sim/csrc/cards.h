// The simulated cards: how many, how large, what they hold, what they did, what goes wrong on them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// What one card has counted since the process began, or since `reset_counters`.
struct Counters {
  uint64_t kernels = 0;             // operations run on the card
  uint64_t host_to_card_bytes = 0;  // copied
  uint64_t card_to_host_bytes = 0;
  uint64_t card_to_host_copies = 0;
  // Of these: for which the host would wait until the card has done all it was given before.
  uint64_t host_waits = 0;
  uint64_t card_to_card_bytes = 0;
  uint64_t allocations = 0;
  std::map<std::string, uint64_t> operations;        // name -> times
  std::map<std::string, uint64_t> collective_calls;  // name -> times
  std::map<std::string, uint64_t> collective_bytes;  // name -> bytes given to it
};

struct Memory {
  uint64_t in_use = 0;
  uint64_t peak = 0;
  uint64_t allocated = 0;  // bytes ever handed out
  uint64_t freed = 0;
  uint64_t out_of_memory = 0;  // times that a request was refused
};

// Once per process, before any card is used; anygauge_sim/settings.py says what the values mean.
// Throws if the trace cannot be written.
void configure(
    const std::vector<int>& numbers, uint64_t capacity, const std::string& locks,
    const std::string& trace);

int visible_cards() noexcept;  // 0 until configured: torch counts devices before they are loaded
uint64_t capacity();

// The number on the machine of a card that this process sees as `index`.
int card_number(int index);

// A card belongs to one process: from `claim`, or else its first allocation, until every claim was
// given back and nothing is allocated on it any more; at the latest until the process ends.
// An allocation after that takes it again, for as long as it lives.
void claim(int index);  // throws if another process holds the card
void give_back(int index);

void* allocate(int index, size_t bytes);
void release(void* pointer);
int card_of(const void* pointer);  // -1 if on none

Memory memory(int index);
void reset_peak(int index);

void count_kernel(int index, const std::string& name);
// -1 is the host, which waits for some copies.
void count_copy(int from, int to, uint64_t bytes, bool waits);
void count_collective(int index, const std::string& name, uint64_t bytes);
Counters counters(int index);
void reset_counters(int index);

// The card that calls of this thread go to.
int current_card() noexcept;
void set_current_card(int index);

}  // namespace sim
