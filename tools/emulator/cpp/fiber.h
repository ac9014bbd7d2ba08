// Stacks that are switched by hand.
#pragma once

#include <cstddef>

#if defined(__x86_64__)

// Saves the stack pointer of the running fiber and continues the one that left `to`.
extern "C" void exchange_stacks(void** from, void* to);

namespace emu {

struct Context {
  void* stack = nullptr;
};
inline void change(Context& from, Context& to) { exchange_stacks(&from.stack, to.stack); }
inline void prepare(Context& context, char* bottom, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(bottom + bytes) - 2;  // the entry finds its stack as after a call
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  context.stack = top - 6;
}

}  // namespace emu

#else
#include <ucontext.h>

namespace emu {

struct Context {
  ucontext_t place;
};
inline void change(Context& from, Context& to) { swapcontext(&from.place, &to.place); }
inline void prepare(Context& context, char* bottom, size_t bytes, void (*entry)()) {
  getcontext(&context.place);
  context.place.uc_stack.ss_sp = bottom;
  context.place.uc_stack.ss_size = bytes;
  context.place.uc_link = nullptr;
  makecontext(&context.place, entry, 0);
}

}  // namespace emu
#endif
