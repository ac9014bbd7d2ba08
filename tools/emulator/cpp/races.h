// Data races in shared memory, found by vector clocks whatever the schedule was.  A run goes on after one.
//
// Two accesses to the same bytes, one of them a write, must be ordered by __syncwarp, a barrier of the CTA, an
// mbarrier, or a wait for the asynchronous operation that made one of them.  Shuffles, votes, matrix loads and products
// order nothing.  What a thread wrote must pass a proxy fence before a tensor store or a product reads it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emu::races {

// What happened before: for each thread and each asynchronous agent the last moment known of; `fenced` is the part of
// it that has passed a proxy fence.
struct Knowledge {
  std::vector<uint32_t> seen, fenced;

  void join(const Knowledge& other);
};

// An asynchronous operation: who does it, when, and what its issuer knew.
struct Operation {
  uint32_t agent = 0, moment = 0;
  const void* place = nullptr;  // where it was issued: a code address
  std::shared_ptr<const Knowledge> knowledge;
};

// Before the first CTA, and before each, of so many threads.
void start(bool on);
void reset(unsigned threads);
bool on();

// The running thread's knowledge goes into `gathered`; what it does from now on is not part of that.
void release(Knowledge& gathered);
void acquire(unsigned thread, const Knowledge& released);
// All lanes of `mask` of a warp that starts at thread `first` learn what any of them knows.
void meet(unsigned first, uint32_t mask);
void proxy_fence();

// An operation of the running thread, or of its whole warp: then all that any of its lanes knows came before.
Operation begin_copy(const void* place);
Operation begin_product(unsigned first, const void* place);
// `thread` knows that the operation has ended.
void ended(unsigned thread, const Operation& operation);
void ended(Knowledge& gathered, const Operation& operation);

// The races found since `start`, each pair of places once.
std::string found();

// Accesses to shared addresses, by the running thread or another.  `place`: a code address to report.
void access(uint32_t address, uint32_t bytes, bool write, const void* place = nullptr);
void access_by(unsigned thread, uint32_t address, uint32_t bytes, bool write, const void* place);
void access(uint32_t address, uint32_t bytes, bool write, const Operation& operation);

}  // namespace emu::races
