#include "races.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "state.h"

namespace emu::races {
namespace {

constexpr unsigned kCopyAgents = 64;
constexpr uint32_t kCell = 2;  // bytes
constexpr size_t kReports = 20;

struct Moment {
  uint16_t who;
  bool asynchronous;
  uint32_t when;
  const void* place;
};

struct Cell {
  Moment write{0, false, 0, nullptr};  // when 0: never written
  std::vector<Moment> reads;           // since the last write
};

struct Snapshot {
  uint64_t learned = ~0ull;  // by all lanes
  std::shared_ptr<const Knowledge> knowledge;
};

struct Recorder {
  bool on = false;
  unsigned threads = 0, copies = 0;
  uint32_t used = kSharedBytes;        // past the last address that was accessed
  std::vector<Knowledge> knowledge;    // of each thread
  std::vector<uint32_t> agent_moment;  // of each agent, from `threads` on: warps, then copies
  std::vector<Cell> cells;
  std::vector<uint64_t> learned;    // how often each thread learned something
  std::vector<Snapshot> snapshots;  // of each warp, at its last product
  std::set<std::tuple<const void*, const void*, int>> reported;
  std::string text;
} r;

std::string who_text(const Moment& moment) {
  if (moment.who < r.threads) return say("thread %u", moment.who);
  const unsigned agent = moment.who - r.threads, warps = m.warps.size();
  return agent < warps ? say("a product of warp %u", agent) : std::string("an asynchronous copy");
}

void report(uint32_t address, const Moment& before, bool wrote, const Moment& now, bool writes, bool fence) {
  const char* cause =
      fence ? "without a proxy fence (tl::fence_proxy_async) between them" : "and nothing orders the two";
  if (r.reported.size() >= kReports) return;
  if (!r.reported.insert({before.place, now.place, wrote * 2 + writes}).second) return;
  r.text +=
      say("\ndata race in block %u at %s: %s %s it, then %s %s it, %s", blockIdx.x, shared_name(address).c_str(),
          who_text(before).c_str(), wrote ? "wrote" : "read", who_text(now).c_str(), writes ? "wrote" : "read", cause);
  r.text += "\n  first" + code_text(before.place) + "\n  then" + code_text(now.place);
}

// The access of `now` to a cell; it knows `seen` and, for what it needs to see through another proxy, `fenced`.
void touch(uint32_t address, const Moment& now, bool writes, const Knowledge& knowledge) {
  Cell& cell = r.cells[address / kCell];
  r.used = std::max(r.used, address + kCell);
  const Moment& write = cell.write;
  if (write.when && write.who != now.who) {
    if (knowledge.seen[write.who] < write.when) report(address, write, true, now, writes, false);
    if (now.asynchronous && !write.asynchronous && knowledge.fenced[write.who] < write.when)
      report(address, write, true, now, writes, true);
  }
  if (writes) {
    for (const Moment& read : cell.reads)
      if (read.who != now.who && knowledge.seen[read.who] < read.when) report(address, read, false, now, true, false);
    cell.reads.clear();
    cell.write = now;
    return;
  }
  for (Moment& read : cell.reads)
    if (read.who == now.who) {
      read = now;
      return;
    }
  cell.reads.push_back(now);
}

void join(std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
  if (into.empty()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

Operation begin(unsigned agent, const void* place, std::shared_ptr<const Knowledge> knowledge) {
  return {r.threads + agent, ++r.agent_moment[agent], place, std::move(knowledge)};
}

}  // namespace

void Knowledge::join(const Knowledge& other) {
  races::join(seen, other.seen);
  races::join(fenced, other.fenced);
}

bool on() { return r.on; }

std::string found() { return r.text; }

void start(bool on) {
  r.on = on;
  r.reported.clear();
  r.text.clear();
}

void reset(unsigned threads) {
  if (!r.on) return;
  const unsigned warps = (threads + 31) / 32, agents = warps + kCopyAgents;
  r.threads = threads;
  r.copies = 0;
  r.agent_moment.assign(agents, 0);
  r.learned.assign(threads, 0);
  r.snapshots.assign(warps, {});
  r.knowledge.assign(threads, {});
  for (unsigned t = 0; t < threads; ++t) {
    r.knowledge[t].seen.assign(threads + agents, 0);
    r.knowledge[t].fenced.assign(threads + agents, 0);
    r.knowledge[t].seen[t] = 1;
  }
  r.cells.resize(kSharedBytes / kCell);
  for (uint32_t i = 0; i < r.used / kCell; ++i) {
    r.cells[i].write.when = 0;
    r.cells[i].reads.clear();
  }
  r.used = 0;
}

void release(Knowledge& gathered) {
  if (!r.on) return;
  Knowledge& mine = r.knowledge[this_thread()];
  gathered.join(mine);
  ++mine.seen[this_thread()];
}

void acquire(unsigned thread, const Knowledge& released) {
  if (!r.on || released.seen.empty()) return;
  r.knowledge[thread].join(released);
  ++r.learned[thread];
}

void meet(unsigned first, uint32_t mask) {
  if (!r.on) return;
  Knowledge all;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) all.join(r.knowledge[first + lane]);
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) {
      r.knowledge[first + lane] = all;
      ++r.knowledge[first + lane].seen[first + lane];
      ++r.learned[first + lane];
    }
}

void proxy_fence() {
  if (!r.on) return;
  Knowledge& mine = r.knowledge[this_thread()];
  mine.fenced = mine.seen;
  ++r.learned[this_thread()];
  ++mine.seen[this_thread()];
}

Operation begin_copy(const void* place) {
  if (!r.on) return {};
  const unsigned agent = m.warps.size() + r.copies++ % kCopyAgents;
  const Operation operation = begin(agent, place, std::make_shared<Knowledge>(r.knowledge[this_thread()]));
  ++r.knowledge[this_thread()].seen[this_thread()];
  return operation;
}

Operation begin_product(unsigned first, const void* place) {
  if (!r.on) return {};
  // What the lanes wrote since they last learned something has passed no fence, so the last snapshot still serves.
  Snapshot& snapshot = r.snapshots[first / 32];
  uint64_t learned = 0;
  for (unsigned lane = 0; lane < 32; ++lane) learned += r.learned[first + lane];
  if (snapshot.learned != learned) {
    Knowledge all;
    for (unsigned lane = 0; lane < 32; ++lane) {
      all.join(r.knowledge[first + lane]);
      ++r.knowledge[first + lane].seen[first + lane];
    }
    snapshot = {learned, std::make_shared<Knowledge>(std::move(all))};
  }
  return begin(first / 32, place, snapshot.knowledge);
}

void ended(unsigned thread, const Operation& operation) {
  if (!r.on) return;
  uint32_t& known = r.knowledge[thread].seen[operation.agent];
  if (known >= operation.moment) return;
  known = operation.moment;
  ++r.learned[thread];
}

void ended(Knowledge& gathered, const Operation& operation) {
  if (!r.on) return;
  gathered.seen.resize(operation.knowledge->seen.size());
  gathered.fenced.resize(operation.knowledge->seen.size());
  gathered.seen[operation.agent] = std::max(gathered.seen[operation.agent], operation.moment);
}

void access_by(unsigned thread, uint32_t address, uint32_t bytes, bool write, const void* place) {
  if (!r.on) return;
  const Knowledge& knowledge = r.knowledge[thread];
  const Moment now{uint16_t(thread), false, knowledge.seen[thread], place};
  for (uint32_t a = address / kCell * kCell; a < address + bytes; a += kCell) touch(a, now, write, knowledge);
}

void access(uint32_t address, uint32_t bytes, bool write, const void* place) {
  if (r.on) access_by(this_thread(), address, bytes, write, place);
}

void access(uint32_t address, uint32_t bytes, bool write, const Operation& operation) {
  if (!r.on) return;
  const Moment now{uint16_t(operation.agent), true, operation.moment, operation.place};
  for (uint32_t a = address / kCell * kCell; a < address + bytes; a += kCell)
    touch(a, now, write, *operation.knowledge);
}

}  // namespace emu::races

// ---- Hooks that g++ calls at every access of a kernel compiled with -fsanitize=thread.

// The first and last bytes of this library, by the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

namespace {

using namespace emu;

void on_access(const char* pointer, size_t bytes, bool write, const void* place) {
  if (size_t(pointer - m.stacks) < m.num_stacks * kStackBytes) return;
  const size_t offset = pointer - m.shared;
  if (offset < kSharedBytes) {
    shared_pointer(offset, bytes, 1, write ? "a store" : "a load");
    races::access(offset, bytes, write, place);
    return;
  }
  for (const Buffer& b : m.buffers) {
    if (pointer < b.outer - kGuard || pointer >= b.outer + b.outer_bytes + kGuard) continue;
    if (pointer < b.data || pointer + bytes > b.data + b.bytes)
      fail("a thread must stay inside its tensors, but it %s %zu bytes at byte %td of the %zu of `%s`",
           write ? "wrote" : "read", bytes, pointer - b.data, b.bytes, b.name.c_str());
    if (size_t(pointer) % (bytes > 16 ? 1 : bytes) && (bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16))
      fail("an access of %zu bytes to `%s` must be aligned, but is at byte %td", bytes, b.name.c_str(),
           pointer - b.data);
    return;
  }
  if (pointer < &__ehdr_start || pointer >= &_end)
    fail("a thread must stay inside its tensors, but it %s %zu bytes at %p, which is in none of its tensors",
         write ? "wrote" : "read", bytes, static_cast<const void*>(pointer));
}

}  // namespace

#define EMU_HOOK(bytes)                                                                                             \
  void __tsan_read##bytes(void* p) { on_access(static_cast<char*>(p), bytes, false, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* p) { on_access(static_cast<char*>(p), bytes, true, __builtin_return_address(0)); }
#define EMU_UNALIGNED_HOOK(bytes)                                         \
  EMU_HOOK(bytes)                                                         \
  void __tsan_unaligned_read##bytes(void* p) { __tsan_read##bytes(p); }   \
  void __tsan_unaligned_write##bytes(void* p) { __tsan_write##bytes(p); } \
  void __tsan_volatile_read##bytes(void* p) { __tsan_read##bytes(p); }    \
  void __tsan_volatile_write##bytes(void* p) { __tsan_write##bytes(p); }

extern "C" {
EMU_UNALIGNED_HOOK(1)
EMU_UNALIGNED_HOOK(2)
EMU_UNALIGNED_HOOK(4)
EMU_UNALIGNED_HOOK(8)
EMU_UNALIGNED_HOOK(16)
void __tsan_read_range(void* p, size_t bytes) {
  on_access(static_cast<char*>(p), bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  on_access(static_cast<char*>(p), bytes, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
