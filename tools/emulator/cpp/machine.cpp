#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>
#include <execinfo.h>

#include "state.h"

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
#endif

extern "C" void emu_kernel(void** arguments);

namespace emu {

Machine m;

namespace {

std::string format(const char* text, va_list list) {
  char line[2048];
  vsnprintf(line, sizeof line, text, list);
  return line;
}

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

// Where a suspended thread is: it is asked itself.
std::string place_of(Thread& t) {
  m.interrogating = true;
  m.current = &t;
  change(m.scheduler, t.context);
  m.current = nullptr;
  m.interrogating = false;
  return m.answer;
}

std::string deadlock() {
  std::string text = say("deadlock in block %u: every thread that has not exited waits.", blockIdx.x);
  for (size_t w = 0; w < m.warps.size(); ++w) {
    std::vector<std::pair<std::string, uint32_t>> groups;
    for (unsigned lane = 0; lane < m.warps[w].lanes; ++lane) {
      Thread& t = m.threads[m.warps[w].first + lane];
      const std::string where = t.state == State::exited ? "exited" : "waits at " + waiting_text(t) + place_of(t);
      auto same = groups.begin();
      while (same != groups.end() && same->first != where) ++same;
      if (same == groups.end())
        groups.push_back({where, 1u << lane});
      else
        same->second |= 1u << lane;
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
}

bool has_ready(const Warp& warp) {
  for (unsigned i = 0; i < warp.lanes; ++i)
    if (m.threads[warp.first + i].state == State::ready) return true;
  return false;
}

}  // namespace

std::string code_text(const void* place) {
  static Dl_info library;
  if (!library.dli_fbase) dladdr(reinterpret_cast<void*>(&emu_kernel), &library);
  Dl_info info;
  const char* before = static_cast<const char*>(place) - 1;  // a return address is past its call
  if (!dladdr(before, &info) || info.dli_fbase != library.dli_fbase) return "";
  return say("[+%#tx]", before - static_cast<char*>(info.dli_fbase));
}

std::string here() {
  void* frames[32];
  const int depth = backtrace(frames, 32);
  std::string text;
  for (int i = 0; i < depth; ++i) text += code_text(frames[i]);
  return text;
}

std::string say(const char* text, ...) {
  va_list list;
  va_start(list, text);
  std::string line = format(text, list);
  va_end(list);
  return line;
}

void suspend() {
  change(m.current->context, m.scheduler);
  while (m.interrogating) {
    m.answer = here();
    change(m.current->context, m.scheduler);
  }
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
  races::reset(threads);
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
      try {
        land_any_load();
      } catch (const Failure&) {
        m.error += say(" (block %u, a tensor load that landed late)", blockIdx.x);
      }
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
  check_products();
}

void fail(const char* text, ...) {
  va_list list;
  va_start(list, text);
  m.error = format(text, list);
  va_end(list);
  if (!m.current) throw Failure();
  m.error += say(" (block %u, thread %u)%s", blockIdx.x, this_thread(), here().c_str());
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

void sync_warp(uint32_t mask) {
  collective("__syncwarp", mask, nullptr, [](void* const*, uint32_t mask) { races::meet(this_warp().first, mask); });
}

void yield() { suspend(); }
unsigned lane() { return this_lane(); }
unsigned warp() { return this_warp().first / 32; }
uint32_t whole_warp() {
  const unsigned lanes = this_warp().lanes;
  return lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
}
bool strict_convergence() { return m.strict; }

void named_barrier(int id, int count, bool wait) {
  if (id < 0 || id > 15) fail("`0 <= barrier < 16` must hold, but got %d", id);
  Named& b = m.named[id];
  if (count == 0) count = m.threads.size();
  if (count % 32) fail("barrier %d: `count %% 32 == 0` must hold, but got %d", id, count);
  if (b.arrived && b.count != count) fail("barrier %d: some threads wait for %d, others for %d", id, b.count, count);
  b.count = count;
  ++b.arrived;
  races::release(b.knowledge);
  if (b.arrived == b.count) {
    if (wait) races::acquire(this_thread(), b.knowledge);
    for (unsigned i = 0; i < m.threads.size(); ++i) {
      Thread& t = m.threads[i];
      if (t.wait != Wait::named || t.parity != uint32_t(id)) continue;
      races::acquire(i, b.knowledge);
      t.state = State::ready;
      t.wait = Wait::none;
    }
    b = {};
    return;
  }
  if (!wait) return;
  m.current->state = State::waiting;
  m.current->wait = Wait::named;
  m.current->parity = id;
  suspend();
}

}  // namespace emu
