#pragma once

#include "common.h"

namespace tl {

// One thread of every `Extent` of the CTA; 0: one of all.  The hardware makes the warp converge here without ordering
// its memory accesses; runs do so or not, as their seed says.
template <int Extent>
EMU_INSTRUCTION bool tl_shuffle_elect() {
  if (emu::strict_convergence()) emu::collective("elect", emu::whole_warp(), nullptr, [](void* const*, uint32_t) {});
  if (emu::lane() != 0) return false;
  return Extent == 0 ? emu::warp() == 0 : Extent == 32 || emu::warp() % ((Extent + 31) / 32) == 0;
}

EMU_INSTRUCTION void warpgroup_arrive() { emu::product_fence(); }
EMU_INSTRUCTION void warpgroup_commit_batch() { emu::product_commit(); }
template <int Pending>
EMU_INSTRUCTION void wait_wgmma() {
  emu::product_wait(Pending);
}
template <int Pending>
EMU_INSTRUCTION void warpgroup_wait() {
  emu::product_wait(Pending);
}
template <typename T>
EMU_INSTRUCTION void warpgroup_fence_operand(T*, int) {}

template <uint32_t Registers>
EMU_INSTRUCTION void warpgroup_reg_alloc() {}
template <uint32_t Registers>
EMU_INSTRUCTION void warpgroup_reg_dealloc() {}

}  // namespace tl
