// Shared memory, tensors between guard pages, and what happens to a thread that leaves them.
#include <csignal>
#include <cstdlib>
#include <memory>

#include <sys/mman.h>

#include "state.h"

namespace emu {
namespace {

const char* buffer_of_guard(const char* address, const char** side) {
  for (const Buffer& b : m.buffers) {
    if (address >= b.outer - kGuard && address < b.outer) return *side = "before the start", b.name.c_str();
    char* end = b.outer + b.outer_bytes;
    if (address >= end && address < end + kGuard) return *side = "past the end", b.name.c_str();
  }
  return nullptr;
}

constexpr size_t kSignalStack = 64 << 10;

void on_signal(int number, siginfo_t* info, void*) {
  const char *address = static_cast<const char*>(info->si_addr), *side = "";
  const char* name = buffer_of_guard(address, &side);
  if (!m.current) {  // the machine itself: as without a handler
    signal(number, SIG_DFL);
    return;
  }
  if (name) fail("a thread must stay inside its tensors, but it accessed memory %s of `%s`", side, name);
  if (number == SIGFPE) fail("a thread divided by zero");
  ptrdiff_t stack = address - m.stacks;
  if (stack >= 0 && size_t(stack) < m.num_stacks * kStackBytes) fail("a thread ran out of its stack");
  fail("a thread accessed memory at %p, which is in none of its tensors, or a vector that is not aligned",
       static_cast<const void*>(address));
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction actions_before[3];
stack_t stack_before;
std::unique_ptr<char[]> signal_stack;

}  // namespace

void install_handlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  signal_stack.reset(new char[kSignalStack]);
  stack_t stack = {};
  stack.ss_sp = signal_stack.get();
  stack.ss_size = kSignalStack;
  sigaltstack(&stack, &stack_before);
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &actions_before[i]);
}

void restore_handlers() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &actions_before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

std::string shared_name(uint32_t address) {
  for (const auto& [declaration, a] : m.statics)
    if (address >= a.address && address < a.address + a.bytes)
      return say("%s + %u bytes", a.name.c_str(), address - a.address);
  if (address >= m.dynamic.address && address < m.dynamic.address + m.dynamic.bytes)
    return say("dynamic shared memory + %u bytes", address - m.dynamic.address);
  return say("shared address %#x", address);
}

void check_tensor(const void* pointer, size_t bytes, const char* who) {
  const char* start = static_cast<const char*>(pointer);
  for (const Buffer& b : m.buffers)
    if (start >= b.data && start + bytes <= b.data + b.bytes) return;
  fail("%s: %zu bytes at %p must lie in one tensor", who, bytes, pointer);
}

void place(Buffer& b) {
  const size_t padded = (b.bytes + 15) / 16 * 16;
  b.outer_bytes = (padded + kPage - 1) / kPage * kPage;
  char* mapped = static_cast<char*>(
      mmap(nullptr, b.outer_bytes + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  b.outer = mapped + kGuard;
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
  munmap(b.outer - kGuard, b.outer_bytes + 2 * kGuard);
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
  if (address % alignment) fail("%s: %s must be aligned to %zu bytes", who, shared_name(address).c_str(), alignment);
  auto inside = [&](const Allocation& a) { return address >= a.address && address + bytes <= a.address + a.bytes; };
  if (inside(m.dynamic)) return raw(address);
  for (const auto& [declaration, a] : m.statics)
    if (inside(a)) return raw(address);
  fail("%s: %zu bytes at %s must lie in one shared buffer", who, bytes, shared_name(address).c_str());
}

void load_shared(uint32_t address, void* words, size_t bytes) {
  std::memcpy(words, shared_pointer(address, bytes, bytes, "ld.shared"), bytes);
  races::access(address, bytes, false, __builtin_return_address(0));
}

void store_shared(uint32_t address, const void* words, size_t bytes) {
  std::memcpy(shared_pointer(address, bytes, bytes, "st.shared"), words, bytes);
  races::access(address, bytes, true, __builtin_return_address(0));
}

void proxy_fence() { races::proxy_fence(); }

void move_matrices(uint32_t address, uint32_t* registers, int count, bool transposed, bool store) {
  struct Arguments {
    uint32_t address, *registers;
    int count;
    bool transposed, store;
    const void* place;
  } mine{address, registers, count, transposed, store, __builtin_return_address(0)};
  const char* who = store ? "stmatrix" : "ldmatrix";
  if (lane() < unsigned(count) * 8) {
    shared_pointer(address, 16, 16, who);
    if (store) races::access(address, 16, true, mine.place);
  }
  collective(who, 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    const Arguments& first = *static_cast<Arguments*>(lanes[0]);
    for (int matrix = 0; matrix < first.count; ++matrix)
      for (int row = 0; row < 8; ++row) {
        const uint32_t address = static_cast<Arguments*>(lanes[matrix * 8 + row])->address;
        char* place = raw(address);
        for (int column = 0; column < 8; ++column) {
          const int r = first.transposed ? column : row, c = first.transposed ? row : column;
          uint32_t& word = static_cast<Arguments*>(lanes[r * 4 + c / 2])->registers[matrix];
          char* half = reinterpret_cast<char*>(&word) + c % 2 * 2;
          if (first.store) {
            std::memcpy(place + column * 2, half, 2);
          } else {  // whoever gets an element has read it, whoever brought the address
            const unsigned thread = this_warp().first + r * 4 + c / 2;
            races::access_by(thread, address + column * 2, 2, false, static_cast<Arguments*>(lanes[r * 4])->place);
            std::memcpy(half, place + column * 2, 2);
          }
        }
      }
  });
}

}  // namespace emu
