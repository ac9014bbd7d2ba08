#pragma once

#include "common.h"

namespace tl {

template <int Bytes>
EMU_INSTRUCTION void cp_async_gs(const void* shared, const void* global) {
  emu::thread_copy(shared, global, Bytes);
}
template <int Bytes>
EMU_INSTRUCTION void cp_async_gs_conditional(const void* shared, const void* global, bool present) {
  emu::thread_copy(shared, present ? global : nullptr, Bytes);
}
EMU_INSTRUCTION void cp_async_commit() { emu::thread_copy_commit(); }
template <int Pending>
EMU_INSTRUCTION void cp_async_wait() {
  if (Pending == 0) emu::thread_copy_commit();  // waits for all copies, committed or not
  emu::thread_copy_wait(Pending);
}

}  // namespace tl
