#include "machine.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

emu::Index threadIdx, blockIdx, blockDim, gridDim;

#if defined(__x86_64__)
// In file scope, so that the compiler knows nothing of what it leaves alone.
asm(R"(
.text
.local exchange_stacks
exchange_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
// Saves the stack pointer of the running fiber and continues the one that left `to`.
extern "C" void exchange_stacks(void** from, void* to);
#endif

namespace emu {
namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr uint32_t kSharedBase = 1024, kSharedBytes = 512 << 10, kGap = 256;
constexpr unsigned char kPoison = 0xff, kCanary = 0xa5;
constexpr uint64_t kBarrierMark = 0x6d62617272696572;

// ---- Fibers

#if defined(__x86_64__)
struct Context {
  void* stack = nullptr;
};
void change(Context& from, Context& to) { exchange_stacks(&from.stack, to.stack); }
void prepare(Context& context, char* bottom, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(bottom + bytes) - 2;  // the entry finds its stack as after a call
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  context.stack = top - 6;
}
#else
struct Context {
  ucontext_t place;
};
void change(Context& from, Context& to) { swapcontext(&from.place, &to.place); }
void prepare(Context& context, char* bottom, size_t bytes, void (*entry)()) {
  getcontext(&context.place);
  context.place.uc_stack.ss_sp = bottom;
  context.place.uc_stack.ss_size = bytes;
  context.place.uc_link = nullptr;
  makecontext(&context.place, entry, 0);
}
#endif

enum class State { ready, waiting, exited };
enum class Wait { none, collective, named, mbarrier };

struct StoreCopy {
  TensorMap map;
  char* global = nullptr;  // of a copy without a tensor map
  const char* shared;
  uint32_t bytes = 0;
  int32_t coordinates[5];
};

struct ThreadCopy {
  char* shared;
  const char* global;
  uint32_t bytes;
};

struct Thread {
  Context context;
  Index index;
  State state;
  Wait wait = Wait::none;
  const char* what = "";
  uint32_t mask = 0, parity = 0, address = 0;
  void* arguments = nullptr;
  std::vector<ThreadCopy> open_copies;
  std::vector<std::vector<ThreadCopy>> copy_groups;
  std::vector<StoreCopy> open_stores;
  std::vector<std::vector<StoreCopy>> store_groups;
};

struct Issued {
  Product product;
  const uint32_t* registers[32];
  float* accumulators[32];
};

struct Warp {
  unsigned first, lanes;
  uint64_t priority;
  std::vector<Issued> products;     // not yet executed
  std::vector<size_t> open_groups;  // products of each committed group that were not waited for
  size_t uncommitted = 0, issued = 0;
  bool fenced = false;
};

struct Named {
  int count = 0, arrived = 0;
};

struct Mbarrier {
  uint32_t count, pending, phase;
  int64_t bytes;
};

struct LoadCopy {
  TensorMap map;
  const char* global = nullptr;
  char* shared;
  uint32_t barrier, bytes;
  int32_t coordinates[5];
};

struct Allocation {
  std::string name;
  uint32_t address;
  size_t bytes;
};

struct Buffer {
  std::string name;
  char *outer, *data, *source;
  size_t outer_bytes, bytes;  // the outer bytes without its two guard pages
};

struct Signature {
  uint64_t a, b;
  int columns;
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<std::vector<Signature>> groups;  // products of each warp group, as its first warp issued them
  Named named[16];
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<LoadCopy> loads;
  std::map<int, Allocation> statics;
  Allocation dynamic;
  uint32_t next_static = 0;
  Thread* current = nullptr;
  Context scheduler;
  std::mt19937_64 random;
  int eager_loads = 0, eager_products = 0, eager_stores = 0;  // one in so many is done at once; 0: none
  bool strict = false, poison_loads = false;
  int lane_order = 0;
  uint64_t steps = 0;
  char* stacks = nullptr;
  size_t num_stacks = 0;
  char* shared = nullptr;
  std::vector<Buffer> buffers;
  std::string error;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
};

Machine m;

std::string format(const char* text, va_list list) {
  char line[2048];
  vsnprintf(line, sizeof line, text, list);
  return line;
}
__attribute__((format(printf, 1, 2))) std::string say(const char* text, ...) {
  va_list list;
  va_start(list, text);
  std::string line = format(text, list);
  va_end(list);
  return line;
}

Warp& this_warp() { return m.warps[(m.current - m.threads.data()) / 32]; }
unsigned this_lane() { return (m.current - m.threads.data()) % 32; }

std::string shared_name(uint32_t address) {
  for (const auto& [declaration, a] : m.statics)
    if (address >= a.address && address < a.address + a.bytes)
      return say("%s + %u bytes", a.name.c_str(), address - a.address);
  if (address >= m.dynamic.address && address < m.dynamic.address + m.dynamic.bytes)
    return say("dynamic shared memory + %u bytes", address - m.dynamic.address);
  return say("shared address %#x", address);
}

void suspend() { change(m.current->context, m.scheduler); }

void thread_main() {
  m.kernel(m.arguments);
  Thread& t = *m.current;
  if (!t.open_stores.empty() || !t.store_groups.empty())
    fail("a thread must wait for its tensor stores before it exits, but %zu group(s) are pending",
         t.store_groups.size() + !t.open_stores.empty());
  t.state = State::exited;
  suspend();
  std::abort();
}

// ---- Faults

const char* buffer_of_guard(const char* address, const char** side) {
  for (const Buffer& b : m.buffers) {
    if (address >= b.outer - kPage && address < b.outer) return *side = "before the start", b.name.c_str();
    char* end = b.outer + b.outer_bytes;
    if (address >= end && address < end + kPage) return *side = "past the end", b.name.c_str();
  }
  return nullptr;
}

void on_signal(int signal, siginfo_t* info, void* ctx) {
  const char *address = static_cast<const char*>(info->si_addr), *side = "";
  const char* name = buffer_of_guard(address, &side);
  if (!m.current) _exit(128 + signal);
  if (name) fail("a thread must stay inside its tensors, but it accessed memory %s of `%s`", side, name);
  if (signal == SIGFPE) fail("a thread divided by zero");
  ptrdiff_t stack = address - m.stacks;
  if (stack >= 0 && size_t(stack) < m.num_stacks * kStackBytes) fail("a thread ran out of its stack");
  fail("a thread accessed memory at %p, which is in none of its tensors, or a vector that is not aligned",
       static_cast<const void*>(address));
}

// ---- Copies between tensors and shared memory

uint32_t swizzled(uint32_t address, int bits) { return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4); }

// Calls body(shared address, global pointer or null, bytes) for every element or run of elements of a box.
template <typename Body>
void for_box(const TensorMap& map, const int32_t* origin, uint32_t shared, Body body) {
  const uint32_t element = map.strides[0], row_elements = map.box[0];
  const uint32_t unit = 16 / element;
  uint32_t rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t offset = 0;
    bool inside = true;
    for (uint32_t d = 1, rest = row; d < uint32_t(map.rank); ++d) {
      int64_t at = int64_t(origin[d]) + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && at >= 0 && at < int64_t(map.dims[d]);
      offset += uint64_t(at) * map.strides[d];
    }
    for (uint32_t column = 0; column < row_elements; column += unit) {
      const uint32_t place = swizzled(shared + (row * row_elements + column) * element, map.swizzle);
      const int64_t at = int64_t(origin[0]) + column, end = map.dims[0];
      if (inside && at >= 0 && at + unit <= end) {
        body(place, reinterpret_cast<char*>(map.base + offset + at * element), 16u);
      } else {
        for (uint32_t i = 0; i < unit; ++i) {
          bool present = inside && at + i >= 0 && at + i < end;
          body(place + i * element,
               present ? reinterpret_cast<char*>(map.base + offset + (at + i) * element) : nullptr, element);
        }
      }
    }
  }
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.strides[0];
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

char* raw(uint32_t address) { return m.shared + address; }

void complete_phase(uint32_t address, Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  ++b.phase;
  for (Thread& t : m.threads)
    if (t.wait == Wait::mbarrier && t.address == address) t.state = State::ready, t.wait = Wait::none;
}

Mbarrier& mbarrier_at(uint32_t address, const char* who) {
  uint64_t mark;
  std::memcpy(&mark, shared_pointer(address, 8, 8, who), 8);
  auto found = m.mbarriers.find(address);
  if (found == m.mbarriers.end())
    fail("%s: the mbarrier at %s must be initialised first", who, shared_name(address).c_str());
  if (mark != kBarrierMark)
    fail("%s: the mbarrier at %s was overwritten as if it were data", who, shared_name(address).c_str());
  return found->second;
}

void land(const LoadCopy& copy) {
  const uint32_t shared = copy.shared - m.shared;
  if (copy.global) {
    std::memcpy(copy.shared, copy.global, copy.bytes);
  } else {
    for_box(copy.map, copy.coordinates, shared, [](uint32_t place, const char* global, uint32_t bytes) {
      if (global) std::memcpy(raw(place), global, bytes);
      else std::memset(raw(place), 0, bytes);
    });
  }
  Mbarrier& b = mbarrier_at(copy.barrier, "a tensor load");
  b.bytes -= copy.bytes;
  complete_phase(copy.barrier, b);
}

void land(const StoreCopy& copy) {
  if (copy.global) {
    std::memcpy(copy.global, copy.shared, copy.bytes);
    return;
  }
  for_box(copy.map, copy.coordinates, copy.shared - m.shared, [](uint32_t place, char* global, uint32_t bytes) {
    if (global) std::memcpy(global, raw(place), bytes);
  });
}

void check_map(const TensorMap& map, uint32_t shared, int rank, const char* who) {
  if (map.rank != rank) fail("%s: a tensor map of rank %d got %d coordinates", who, map.rank, rank);
  if (shared % 128) fail("%s: %s must be aligned to 128 bytes", who, shared_name(shared).c_str());
}

void pop_load(size_t which) {
  LoadCopy copy = m.loads[which];
  m.loads.erase(m.loads.begin() + which);
  land(copy);
}

// ---- Warp group products

uint16_t element_at(uint64_t descriptor, bool mn_major, int mn, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int layout = descriptor >> 62;  // 0: none, 1: 128 bytes, 2: 64 bytes, 3: 32 bytes
  const int bits = layout == 0 ? 0 : 4 - layout;
  uint32_t offset;
  if (!mn_major) {
    // Rows of one atom follow each other; eight of them, then `stride`.
    offset = (mn & 7) * (16u << bits) + (mn >> 3) * stride;
    offset += layout == 0 ? (k >> 3) * leading + (k & 7) * 2 : k * 2;
  } else if (layout == 0) {
    offset = (mn & 7) * 2 + (mn >> 3) * stride + (k & 7) * 16 + (k >> 3) * leading;
  } else {
    const int width = 8 << bits;  // elements of a row of an atom
    offset = (mn % width) * 2 + (mn / width) * leading + (k & 7) * (16u << bits) + (k >> 3) * stride;
  }
  uint16_t value;
  std::memcpy(&value, raw(swizzled(start + offset, bits)), 2);
  return value;
}

float number(uint16_t bits, bool half) { return half ? from_half(bits) : from_bfloat16(bits); }

void check_span(uint64_t descriptor, const char* who) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  if (start < m.dynamic.address || start >= m.dynamic.address + m.dynamic.bytes)
    fail("%s: a descriptor must start in dynamic shared memory, but it starts at %s", who, shared_name(start).c_str());
  if (descriptor >> 49 & 7) fail("%s: base offsets of descriptors are not modelled", who);
}

// The 16 rows of one warp.
void execute(const Warp& warp, const Issued& issued) {
  const Product& p = issued.product;
  const int n = p.columns, row0 = (warp.first / 32 & 3) * 16;
  static float a[16][16], b[16][256], acc[16][256];
  if (p.registers) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {  // pairs: rows 0 and 8, then columns 8
        const uint16_t bits = issued.registers[lane][i >> 1] >> (i & 1) * 16;
        a[(lane >> 2) + (i >> 1 & 1) * 8][(lane & 3) * 2 + (i & 1) + (i >> 2) * 8] = number(bits, p.half) * p.sign;
      }
  } else {
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k) a[r][k] = number(element_at(p.a, p.a_mn, row0 + r, k), p.half) * p.sign;
  }
  for (int k = 0; k < 16; ++k)
    for (int c = 0; c < n; ++c) b[k][c] = number(element_at(p.b, p.b_mn, c, k), p.half);
  auto for_accumulators = [&](auto body) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < n / 2; ++i)
        body(issued.accumulators[lane][i], acc[(lane >> 2) + (i >> 1 & 1) * 8][(i >> 2) * 8 + (lane & 3) * 2 + (i & 1)]);
  };
  for_accumulators([&](float& held, float& place) { place = p.keep ? held : 0.f; });
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; ++k) {
      const float factor = a[r][k];
      for (int c = 0; c < n; ++c) acc[r][c] += factor * b[k][c];
    }
  for_accumulators([](float& held, float& place) { held = place; });
}

void execute_first(Warp& warp, size_t count) {
  for (size_t i = 0; i < count; ++i) execute(warp, warp.products[i]);
  warp.products.erase(warp.products.begin(), warp.products.begin() + count);
}

// ---- Scheduling

bool one_in(int n) { return n > 0 && m.random() % n == 0; }

std::string lanes_text(uint32_t mask) {
  if (mask == 0xffffffffu) return "all lanes";
  std::string text = "lanes";
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      int end = i;
      while (end < 31 && mask >> (end + 1) & 1) ++end;
      text += end > i ? say(" %d-%d", i, end) : say(" %d", i);
      i = end;
    }
  return text;
}

std::string waiting_text(const Thread& t) {
  if (t.wait == Wait::collective) return say("%s with mask %#x", t.what, t.mask);
  if (t.wait == Wait::named)
    return say("barrier %u, where %d of %d threads are", t.parity, m.named[t.parity].arrived, m.named[t.parity].count);
  const Mbarrier& b = m.mbarriers.at(t.address);
  return say("parity %u of the mbarrier at %s: phase %u, %u of %u arrivals missing, %lld bytes expected", t.parity,
             shared_name(t.address).c_str(), b.phase, b.pending, b.count, static_cast<long long>(b.bytes));
}

std::string deadlock() {
  std::string text = say("deadlock in block %u: every thread that has not exited waits.", blockIdx.x);
  for (size_t w = 0; w < m.warps.size(); ++w) {
    std::vector<std::pair<std::string, uint32_t>> groups;
    for (unsigned lane = 0; lane < m.warps[w].lanes; ++lane) {
      const Thread& t = m.threads[m.warps[w].first + lane];
      const std::string where = t.state == State::exited ? "exited" : "waits at " + waiting_text(t);
      auto same = groups.begin();
      while (same != groups.end() && same->first != where) ++same;
      if (same == groups.end()) groups.push_back({where, 1u << lane});
      else same->second |= 1u << lane;
    }
    for (const auto& [where, mask] : groups)
      text += say("\n  warp %zu, %s: %s", w, lanes_text(mask).c_str(), where.c_str());
  }
  return text;
}

void run_warp(Warp& warp) {
  const unsigned shift = m.lane_order == 2 ? m.random() % warp.lanes : 0;
  for (unsigned i = 0; i < warp.lanes; ++i) {
    unsigned lane = m.lane_order == 0 ? i : m.lane_order == 1 ? warp.lanes - 1 - i : (i + shift) % warp.lanes;
    Thread& t = m.threads[warp.first + lane];
    if (t.state != State::ready) continue;
    m.current = &t;
    threadIdx = t.index;
    change(m.scheduler, t.context);
    m.current = nullptr;
    if (!m.error.empty()) return;
  }
  ++m.steps;
}

bool has_ready(const Warp& warp) {
  for (unsigned i = 0; i < warp.lanes; ++i)
    if (m.threads[warp.first + i].state == State::ready) return true;
  return false;
}

void run_cta(size_t dynamic_bytes) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  std::memset(m.shared, kPoison, kSharedBytes);
  m.mbarriers.clear();
  m.loads.clear();
  m.statics.clear();
  m.dynamic = {"dynamic", kSharedBase, dynamic_bytes};
  m.next_static = kSharedBase + dynamic_bytes + kGap;
  for (Named& n : m.named) n = {};
  m.threads.assign(threads, Thread{});
  m.warps.assign((threads + 31) / 32, Warp{});
  m.groups.assign((threads + 127) / 128, {});
  for (size_t w = 0; w < m.warps.size(); ++w) {
    m.warps[w].first = w * 32;
    m.warps[w].lanes = threads - w * 32 < 32 ? threads - w * 32 : 32;
    m.warps[w].priority = m.random();
  }
  for (unsigned i = 0; i < threads; ++i) {
    Thread& t = m.threads[i];
    t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    t.state = State::ready;
    prepare(t.context, m.stacks + i * kStackBytes + kPage, kStackBytes - kPage, thread_main);
  }
  while (m.error.empty()) {
    Warp* next = nullptr;
    for (Warp& w : m.warps)
      if (has_ready(w) && (!next || w.priority > next->priority)) next = &w;
    if (!m.loads.empty() && (!next || one_in(m.eager_loads * 4))) {
      pop_load(m.random() % m.loads.size());
      continue;
    }
    if (!next) break;
    run_warp(*next);
    if (one_in(16)) m.warps[m.random() % m.warps.size()].priority = m.random();
  }
  if (!m.error.empty()) return;
  for (const Thread& t : m.threads)
    if (t.state != State::exited) {
      m.error = deadlock();
      return;
    }
  for (size_t w = 0; w < m.warps.size(); ++w) {
    const Warp& warp = m.warps[w];
    if (!warp.products.empty() || warp.uncommitted)
      m.error = say("warp %zu of block %u exited with %zu products that it did not wait for", w, blockIdx.x,
                    warp.products.size());
    if (warp.issued != m.groups[w / 4].size())
      m.error = say("warp %zu of block %u issued %zu products, another warp of its group %zu", w, blockIdx.x,
                    warp.issued, m.groups[w / 4].size());
  }
}

// ---- Tensors between guard pages

void place(Buffer& b) {
  const size_t padded = (b.bytes + 15) / 16 * 16;
  b.outer_bytes = (padded + kPage - 1) / kPage * kPage;
  char* mapped = static_cast<char*>(
      mmap(nullptr, b.outer_bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  b.outer = mapped + kPage;
  b.data = b.outer + b.outer_bytes - padded;
  if (!b.outer_bytes) return;
  mprotect(b.outer, b.outer_bytes, PROT_READ | PROT_WRITE);
  std::memset(b.outer, kCanary, b.outer_bytes);
  std::memcpy(b.data, b.source, b.bytes);
}

void take_back(Buffer& b) {
  const char* end = b.outer + b.outer_bytes;
  for (const char* p = b.outer; p < end; ++p) {
    const bool inside = p >= b.data && p < b.data + b.bytes;
    if (inside) {
      p = b.data + b.bytes - 1;
    } else if (static_cast<unsigned char>(*p) != kCanary && m.error.empty()) {
      m.error = say("a thread must stay inside its tensors, but memory %s of `%s` was written",
                    p < b.data ? "before the start" : "past the end", b.name.c_str());
    }
  }
  if (b.bytes) std::memcpy(b.source, b.data, b.bytes);
  munmap(b.outer - kPage, b.outer_bytes + 2 * kPage);
}

}  // namespace

void fail(const char* text, ...) {
  va_list list;
  va_start(list, text);
  m.error = format(text, list);
  va_end(list);
  if (!m.current) std::abort();
  m.error += say(" (block %u, thread %u).", blockIdx.x, unsigned(m.current - m.threads.data()));
  suspend();
  std::abort();
}

void collective(const char* what, uint32_t mask, void* arguments, Perform perform) {
  Warp& warp = this_warp();
  const unsigned lane = this_lane();
  if (!(mask >> lane & 1)) fail("%s: lane %u is not in its own mask %#x", what, lane, mask);
  Thread& self = *m.current;
  self.what = what;
  self.mask = mask;
  self.arguments = arguments;
  void* lanes[32] = {};
  for (unsigned i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    Thread& t = m.threads[warp.first + i];
    const bool here = i < warp.lanes && (i == lane || (t.state == State::waiting && t.wait == Wait::collective &&
                                                       t.mask == mask && !std::strcmp(t.what, what)));
    if (!here) {
      self.state = State::waiting;
      self.wait = Wait::collective;
      suspend();
      return;
    }
    lanes[i] = t.arguments;
  }
  perform(lanes, mask);
  for (unsigned i = 0; i < warp.lanes; ++i)
    if (mask >> i & 1) {
      m.threads[warp.first + i].state = State::ready;
      m.threads[warp.first + i].wait = Wait::none;
    }
}

void yield() { suspend(); }
unsigned lane() { return this_lane(); }
unsigned warp() { return this_warp().first / 32; }
uint32_t whole_warp() {
  const unsigned lanes = this_warp().lanes;
  return lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
}
bool strict_convergence() { return m.strict; }
bool flip(int n) { return one_in(n); }

void named_barrier(int id, int count, bool wait) {
  if (id < 0 || id > 15) fail("`0 <= barrier < 16` must hold, but got %d", id);
  Named& b = m.named[id];
  if (count == 0) count = m.threads.size();
  if (count % 32) fail("barrier %d: `count %% 32 == 0` must hold, but got %d", id, count);
  if (b.arrived && b.count != count) fail("barrier %d: some threads wait for %d, others for %d", id, b.count, count);
  b.count = count;
  ++b.arrived;
  if (b.arrived == b.count) {
    b.arrived = 0;
    for (Thread& t : m.threads)
      if (t.wait == Wait::named && t.parity == uint32_t(id)) t.state = State::ready, t.wait = Wait::none;
    return;
  }
  if (!wait) return;
  m.current->state = State::waiting;
  m.current->wait = Wait::named;
  m.current->parity = id;
  suspend();
}

void* dynamic_shared() { return raw(m.dynamic.address); }

void* static_shared(const char* name, int declaration, size_t bytes, size_t alignment) {
  auto found = m.statics.find(declaration);
  if (found == m.statics.end()) {
    const uint32_t address = (m.next_static + alignment - 1) / alignment * alignment;
    m.next_static = address + bytes + kGap;
    if (m.next_static > kSharedBytes) fail("`%s` does not fit into shared memory", name);
    found = m.statics.emplace(declaration, Allocation{name, address, bytes}).first;
  }
  return raw(found->second.address);
}

uint32_t shared_address(const void* pointer) {
  const ptrdiff_t offset = static_cast<const char*>(pointer) - m.shared;
  if (offset < 0 || offset >= ptrdiff_t(kSharedBytes))
    fail("%p must point into shared memory to have a shared address", pointer);
  return offset;
}

char* shared_pointer(uint32_t address, size_t bytes, size_t alignment, const char* who) {
  if (address % alignment)
    fail("%s: %s must be aligned to %zu bytes", who, shared_name(address).c_str(), alignment);
  auto inside = [&](const Allocation& a) { return address >= a.address && address + bytes <= a.address + a.bytes; };
  if (inside(m.dynamic)) return raw(address);
  for (const auto& [declaration, a] : m.statics)
    if (inside(a)) return raw(address);
  fail("%s: %zu bytes at %s must lie in one shared buffer", who, bytes, shared_name(address).c_str());
}

void mbarrier_init(const void* barrier, uint32_t count) {
  const uint32_t address = shared_address(barrier);
  if (count == 0 || count >= 1u << 20) fail("an mbarrier must expect 1 .. 2^20 - 1 arrivals, but got %u", count);
  std::memcpy(shared_pointer(address, 8, 8, "mbarrier.init"), &kBarrierMark, 8);
  m.mbarriers[address] = {count, count, 0, 0};
}

void mbarrier_arrive(const void* barrier) {
  const uint32_t address = shared_address(barrier);
  Mbarrier& b = mbarrier_at(address, "mbarrier.arrive");
  if (b.pending == 0) fail("the mbarrier at %s got more than %u arrivals in a phase", shared_name(address).c_str(), b.count);
  --b.pending;
  complete_phase(address, b);
  yield();
}

void mbarrier_expect(const void* barrier, uint32_t bytes) {
  Mbarrier& b = mbarrier_at(shared_address(barrier), "mbarrier.expect_tx");
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) fail("an mbarrier cannot expect %lld bytes", static_cast<long long>(b.bytes));
}

bool mbarrier_passed(const void* barrier, uint32_t parity) {
  return (mbarrier_at(shared_address(barrier), "mbarrier.test_wait").phase & 1) != (parity & 1);
}

void mbarrier_wait(const void* barrier, uint32_t parity) {
  while (!mbarrier_passed(barrier, parity)) {
    m.current->state = State::waiting;
    m.current->wait = Wait::mbarrier;
    m.current->parity = parity;
    m.current->address = shared_address(barrier);
    suspend();
  }
}

static void start(LoadCopy copy) {
  mbarrier_at(copy.barrier, "a tensor load");
  if (m.poison_loads) {
    if (copy.global) std::memset(copy.shared, kPoison, copy.bytes);
    else
      for_box(copy.map, copy.coordinates, copy.shared - m.shared,
              [](uint32_t place, const char*, uint32_t bytes) { std::memset(raw(place), kPoison, bytes); });
  }
  if (one_in(m.eager_loads)) land(copy);
  else m.loads.push_back(copy);
}

static void start(const StoreCopy& copy) {
  m.current->open_stores.push_back(copy);
  if (one_in(m.eager_stores)) land(copy);
}

void tensor_load(const TensorMap& map, const void* barrier, const void* shared, const int32_t* coordinates, int rank) {
  LoadCopy copy;
  copy.map = map;
  copy.bytes = box_bytes(map);
  copy.shared = shared_pointer(shared_address(shared), copy.bytes, 16, "a tensor load");
  check_map(map, copy.shared - m.shared, rank, "a tensor load");
  copy.barrier = shared_address(barrier);
  std::memcpy(copy.coordinates, coordinates, rank * sizeof *coordinates);
  start(copy);
}

void tensor_store(const TensorMap& map, const void* shared, const int32_t* coordinates, int rank) {
  StoreCopy copy;
  copy.map = map;
  copy.bytes = box_bytes(map);
  copy.shared = shared_pointer(shared_address(shared), copy.bytes, 16, "a tensor store");
  check_map(map, copy.shared - m.shared, rank, "a tensor store");
  std::memcpy(copy.coordinates, coordinates, rank * sizeof *coordinates);
  start(copy);
}

void bulk_load(void* shared, const void* global, const void* barrier, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uint64_t>(global) % 16) fail("a bulk load must move aligned units of 16 bytes");
  LoadCopy copy;
  copy.shared = shared_pointer(shared_address(shared), bytes, 16, "a bulk load");
  copy.global = static_cast<const char*>(global);
  copy.bytes = bytes;
  copy.barrier = shared_address(barrier);
  start(copy);
}

void bulk_store(void* global, const void* shared, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uint64_t>(global) % 16) fail("a bulk store must move aligned units of 16 bytes");
  StoreCopy copy;
  copy.shared = shared_pointer(shared_address(shared), bytes, 16, "a bulk store");
  copy.global = static_cast<char*>(global);
  copy.bytes = bytes;
  start(copy);
}

void bulk_commit() {
  m.current->store_groups.push_back(m.current->open_stores);
  m.current->open_stores.clear();
}

void bulk_wait(int pending) {
  auto& groups = m.current->store_groups;
  while (groups.size() > size_t(pending)) {
    for (const StoreCopy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

static void land(const ThreadCopy& copy) {
  if (copy.global) std::memcpy(copy.shared, copy.global, copy.bytes);
  else std::memset(copy.shared, 0, copy.bytes);
}

void thread_copy(const void* shared, const void* global, uint32_t bytes) {
  char* place = shared_pointer(shared_address(shared), bytes, bytes, "cp.async");
  const ThreadCopy copy{place, static_cast<const char*>(global), bytes};
  if (reinterpret_cast<uint64_t>(global) % bytes) fail("cp.async must read from addresses aligned to its %u bytes", bytes);
  if (one_in(m.eager_loads)) land(copy);
  else m.current->open_copies.push_back(copy);
}

void thread_copy_commit() {
  m.current->copy_groups.push_back(m.current->open_copies);
  m.current->open_copies.clear();
}

void thread_copy_wait(int pending) {
  auto& groups = m.current->copy_groups;
  while (groups.size() > size_t(pending)) {
    for (const ThreadCopy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

void product_issue(const Product& product) {
  Product mine = product;
  collective("wgmma", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    Warp& warp = this_warp();
    auto& group = m.groups[warp.first / 128];
    Issued issued;
    issued.product = *static_cast<Product*>(lanes[0]);
    const Product& p = issued.product;
    if (!warp.fenced) fail("wgmma: warpgroup_arrive must come between the last wait and a product");
    if (!p.registers) check_span(p.a, "wgmma");
    check_span(p.b, "wgmma");
    for (int i = 0; i < 32; ++i) {
      const Product& other = *static_cast<Product*>(lanes[i]);
      if (other.b != p.b || other.keep != p.keep || (!p.registers && other.a != p.a))
        fail("wgmma: all lanes of a warp must bring the same descriptors and flags, but lane %d differs", i);
      issued.registers[i] = other.registers;
      issued.accumulators[i] = other.accumulators;
    }
    if (warp.issued == group.size()) {
      group.push_back({p.registers ? 0 : p.a, p.b, p.columns});
    } else {
      const Signature& same = group[warp.issued];
      if (same.b != p.b || same.columns != p.columns || (!p.registers && same.a != p.a))
        fail("wgmma: the warps of a group must issue the same products, but warp %u differs", warp.first / 32);
    }
    ++warp.issued;
    ++warp.uncommitted;
    warp.products.push_back(issued);
    if (one_in(m.eager_products)) execute_first(warp, warp.products.size());
  });
}

void product_fence() {
  collective("warpgroup_arrive", 0xffffffffu, nullptr, [](void* const*, uint32_t) { this_warp().fenced = true; });
}

void product_commit() {
  collective("warpgroup_commit_batch", 0xffffffffu, nullptr, [](void* const*, uint32_t) {
    Warp& warp = this_warp();
    warp.open_groups.push_back(warp.uncommitted);
    warp.uncommitted = 0;
  });
}

void product_wait(int pending) {
  collective("wait_wgmma", 0xffffffffu, &pending, [](void* const* lanes, uint32_t) {
    Warp& warp = this_warp();
    const size_t stay = *static_cast<int*>(lanes[0]);
    size_t kept = warp.uncommitted;
    while (warp.open_groups.size() > stay) warp.open_groups.erase(warp.open_groups.begin());
    for (size_t products : warp.open_groups) kept += products;
    if (warp.products.size() > kept) execute_first(warp, warp.products.size() - kept);
    warp.fenced = false;
  });
}

void warp_product(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, bool half) {
  struct Arguments {
    float* d;
    const uint32_t *a, *b;
    const float* c;
    int k;
    bool half;
  } mine{d, a, b, c, k, half};
  collective("mma", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    const Arguments& first = *static_cast<Arguments*>(lanes[0]);
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Arguments& at = *static_cast<Arguments*>(lanes[lane]);
      const int row = lane >> 2, pair = (lane & 3) * 2;
      for (int i = 0; i < first.k / 2; ++i)  // halves of the registers of A: rows 0 and 8, then columns 8
        a[row + (i >> 1 & 1) * 8][pair + (i & 1) + (i >> 2) * 8] = number(at.a[i >> 1] >> (i & 1) * 16, first.half);
      for (int i = 0; i < first.k / 4; ++i)
        b[pair + (i & 1) + (i >> 1) * 8][row] = number(at.b[i >> 1] >> (i & 1) * 16, first.half);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Arguments& at = *static_cast<Arguments*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) {
        const int row = (lane >> 2) + (i >> 1) * 8, column = (lane & 3) * 2 + (i & 1);
        float sum = at.c[i];
        for (int k = 0; k < first.k; ++k) sum += a[row][k] * b[k][column];
        at.d[i] = sum;
      }
    }
  });
}

float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
  union { uint32_t word; float value; } both;
  if (exponent == 0) {
    both.value = mantissa * 0x1p-24f;
    both.word |= sign;
  } else {
    both.word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  return both.value;
}

uint16_t to_half(float value) {
  union { float value; uint32_t word; } both{value};
  const uint16_t sign = both.word >> 16 & 0x8000u;
  both.word &= 0x7fffffffu;
  if (both.word > 0x7f800000u) return 0x7fff;
  if (both.word >= 0x477ff000u) return sign | 0x7c00;
  if (both.word < 0x38800000u) {  // subnormal: at 0.5 a float's last bit is that of a subnormal half
    both.value += 0.5f;
    return sign | uint16_t(both.word - 0x3f000000u);
  }
  return sign | uint16_t((both.word - 0x38000000u + 0xfffu + (both.word >> 13 & 1u)) >> 13);
}

}  // namespace emu

// ---- What the Python side calls

extern "C" {

struct EmuBuffer {
  const char* name;
  void* data;
  uint64_t bytes;
};

// kind: 'p' pointer to a buffer, 'm' tensor map of a buffer, 'i' int32, 'l' int64, 'f' float.
struct EmuArgument {
  int32_t kind, buffer;
  int64_t integer;
  double real;
  emu::TensorMap map;
};

struct EmuLaunch {
  uint32_t grid[3], block[3];
  uint64_t dynamic_bytes, seed;
  int32_t flush_denormals, num_buffers, num_arguments, error_bytes;
  const EmuBuffer* buffers;
  const EmuArgument* arguments;
  char* error;
};

void emu_kernel(void** arguments);

// 0, or 1 with a message in `error`.
__attribute__((visibility("default"))) int emu_run(const EmuLaunch* launch) {
  using namespace emu;
  m.error.clear();
  m.kernel = emu_kernel;
  m.random.seed(launch->seed * 0x9e3779b97f4a7c15ull + 1);
  for (int i = 0; i < 4; ++i) m.random();
  // Runs of a few seeds meet the extremes; seed 0 is everything late, seed 1 everything at once.
  const int choices[] = {0, 1, 2};
  auto choose = [&] { return launch->seed < 2 ? int(launch->seed) : choices[m.random() % 3]; };
  m.eager_loads = choose();
  m.eager_products = choose();
  m.eager_stores = choose();
  m.lane_order = launch->seed % 3;
  m.strict = launch->seed % 2 == 0;
  m.poison_loads = launch->seed % 4 == 2;
  m.steps = 0;

  const size_t threads = size_t(launch->block[0]) * launch->block[1] * launch->block[2];
  if (m.num_stacks < threads) {
    if (m.stacks) munmap(m.stacks, m.num_stacks * kStackBytes);
    m.num_stacks = threads;
    m.stacks = static_cast<char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (size_t i = 0; i < threads; ++i) mprotect(m.stacks + i * kStackBytes, kPage, PROT_NONE);
  }
  if (!m.shared)
    m.shared = static_cast<char*>(
        mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

  m.buffers.clear();
  for (int i = 0; i < launch->num_buffers; ++i) {
    const EmuBuffer& b = launch->buffers[i];
    m.buffers.push_back({b.name, nullptr, nullptr, static_cast<char*>(b.data), 0, b.bytes});
    place(m.buffers.back());
  }
  struct alignas(64) Value {
    char bytes[sizeof(TensorMap) + 64];
  };
  std::vector<Value> values(launch->num_arguments);
  std::vector<void*> pointers;
  for (int i = 0; i < launch->num_arguments; ++i) {
    const EmuArgument& a = launch->arguments[i];
    char* data = a.buffer >= 0 ? m.buffers[a.buffer].data : nullptr;
    TensorMap map = a.map;
    map.base = reinterpret_cast<uint64_t>(data);
    const int32_t narrow = a.integer;
    const float real = a.real;
    if (a.kind == 'p') std::memcpy(values[i].bytes, &data, sizeof data);
    if (a.kind == 'm') std::memcpy(values[i].bytes, &map, sizeof map);
    if (a.kind == 'i') std::memcpy(values[i].bytes, &narrow, sizeof narrow);
    if (a.kind == 'l') std::memcpy(values[i].bytes, &a.integer, sizeof a.integer);
    if (a.kind == 'f') std::memcpy(values[i].bytes, &real, sizeof real);
    pointers.push_back(values[i].bytes);
  }
  m.arguments = pointers.data();

  constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction action = {}, before[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  std::unique_ptr<char[]> signal_stack(new char[64 << 10]);
  stack_t stack = {}, stack_before;
  stack.ss_sp = signal_stack.get();
  stack.ss_size = 64 << 10;
  sigaltstack(&stack, &stack_before);
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before[i]);
#if defined(__x86_64__)
  const unsigned control = _mm_getcsr();
  if (launch->flush_denormals) _mm_setcsr(control | 0x8040u);
#endif
  blockDim = {launch->block[0], launch->block[1], launch->block[2]};
  gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  for (uint64_t i = 0; i < blocks && m.error.empty(); ++i) {
    blockIdx = {unsigned(i % gridDim.x), unsigned(i / gridDim.x % gridDim.y), unsigned(i / gridDim.x / gridDim.y)};
    run_cta(launch->dynamic_bytes);
  }
#if defined(__x86_64__)
  _mm_setcsr(control);
#endif
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  for (Buffer& b : m.buffers) take_back(b);
  m.threads.clear();
  if (m.error.empty()) return 0;
  snprintf(launch->error, launch->error_bytes, "%s", m.error.c_str());
  return 1;
}
}
