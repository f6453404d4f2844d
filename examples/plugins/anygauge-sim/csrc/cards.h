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

// Cards that this process may see. Reads its settings from the environment once, at load:
//   ANYGAUGE_SIM_CARDS          how many the machine has (8)
//   ANYGAUGE_SIM_CAPACITY       bytes on each (34359738368)
//   ANYGAUGE_SIM_VISIBLE_CARDS  which of them this process may see, as 0,2,3 (all)
//   ANYGAUGE_SIM_LOCKS          folder of lock files: one process a card ("" for no locks; if not
//                               set, one in the folder for temporary files, for each user)
//   ANYGAUGE_SIM_TRACE          file that gets a line per operation ("" for none)
//   ANYGAUGE_SIM_FAULTS         see faults.h
int visible_cards() noexcept;
uint64_t capacity();

// The number on the machine of a card that this process sees as `index`.
int card_number(int index);

// Takes the card for this process. Throws if another process holds it.
void claim(int index);

void* allocate(int index, size_t bytes);
void release(void* pointer);
bool is_card_memory(const void* pointer);
int card_of(const void* pointer);  // -1 if on none

Memory memory(int index);
void reset_peak(int index);

void count_kernel(int index, const std::string& name);
void count_copy(int from, int to, uint64_t bytes);  // -1 is the host
void count_collective(int index, const std::string& name, uint64_t bytes);
Counters counters(int index);
void reset_counters(int index);

// The card that calls of this thread go to.
int current_card() noexcept;
void set_current_card(int index);

}  // namespace sim
