#pragma once

#include "../../cuda.h"
#include "../../ptx.h"

#define TL_DEVICE inline

namespace tl {

// Values are the template arguments of generated products.
enum class DataType : int { kFloat16, kBFloat16, kFloat32 };

struct GmmaDescriptor {
  uint64_t bits = 0;
  operator uint64_t() const { return bits; }
};
// A sum with an offset wraps in the low word only, as the device's 32-bit addition does.
template <typename T>
EMU_INSTRUCTION GmmaDescriptor operator+(GmmaDescriptor descriptor, T offset) {
  return {(descriptor.bits & ~0xffffffffull) | uint32_t(uint32_t(descriptor.bits) + uint32_t(offset))};
}

template <int Layout, int LeadingOffset, int StrideOffset, typename T>
EMU_INSTRUCTION void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  descriptor.bits = (uint64_t(emu::shared_address(start)) >> 4 & 0x3fff) | uint64_t(LeadingOffset & 0x3fff) << 16 |
                    uint64_t(StrideOffset & 0x3fff) << 32 | uint64_t(Layout & 3) << 62;
}
template <typename T>
EMU_INSTRUCTION void increase_descriptor_offset(GmmaDescriptor& descriptor, T bytes) {
  descriptor = descriptor + int(bytes >> 4);
}

EMU_INSTRUCTION void __sync_thread_partial(int id = 0, int count = 0) { emu::named_barrier(id, count, true); }
EMU_INSTRUCTION void __named_barrier_arrive(int id, int count) { emu::named_barrier(id, count, false); }

template <typename T>
EMU_INSTRUCTION T from_uint1(uint1 value) {
  return emu_bits<T>(value);
}
template <typename T>
EMU_INSTRUCTION uint1 to_uint1(T value) {
  return emu_bits<uint1>(value);
}
EMU_INSTRUCTION float fast_rcp(float x) { return 1.f / x; }
EMU_INSTRUCTION float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
EMU_INSTRUCTION float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
EMU_INSTRUCTION float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
EMU_INSTRUCTION float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }

}  // namespace tl
