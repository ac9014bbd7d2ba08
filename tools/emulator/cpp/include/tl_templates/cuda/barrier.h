#pragma once

#include "common.h"

struct alignas(8) Barrier {
  uint64_t storage;

  Barrier() = delete;
  void init(uint32_t count) const { emu::mbarrier_init(this, count); }
  void wait(uint32_t parity) const { emu::mbarrier_wait(this, parity); }
  bool test_wait(uint32_t parity) const {
    const bool passed = emu::mbarrier_passed(this, parity);
    if (!passed) emu::yield();
    return passed;
  }
  bool try_wait(uint32_t parity) const { return test_wait(parity); }
  void arrive() const { emu::mbarrier_arrive(this); }
  void expect_transaction(uint32_t bytes) const { emu::mbarrier_expect(this, bytes); }
  void arrive_and_expect_tx(uint32_t bytes) const {
    emu::mbarrier_expect(this, bytes);
    emu::mbarrier_arrive(this);
  }
};

namespace tl {

EMU_INSTRUCTION void fence_proxy_async() { emu::proxy_fence(); }
EMU_INSTRUCTION void fence_barrier_init() {}
EMU_INSTRUCTION void tma_store_arrive() { emu::bulk_commit(); }
template <int Pending, bool Read = true>
EMU_INSTRUCTION void tma_store_wait() {
  emu::bulk_wait(Pending);
}

}  // namespace tl
