// What inline PTX does, one function per instruction; arguments are the operands in the order of the instruction.
#pragma once

#include "device.h"

namespace emu::ptx {

template <bool Transposed, typename... Word>
EMU_INSTRUCTION void load_matrices(uint32_t address, Word&... out) {
  uint32_t registers[4];
  move_matrices(address, registers, sizeof...(out), Transposed, false);
  int i = 0;
  ((std::memcpy(&out, &registers[i++], 4)), ...);
}
template <bool Transposed, typename... Word>
EMU_INSTRUCTION void store_matrices(uint32_t address, Word... in) {
  uint32_t registers[] = {uint32_t(in)...};
  move_matrices(address, registers, sizeof...(in), Transposed, true);
}

template <typename A, typename B, typename C, typename D>
EMU_INSTRUCTION void ldmatrix_x4(A& a, B& b, C& c, D& d, uint32_t address) {
  load_matrices<false>(address, a, b, c, d);
}
template <typename A, typename B>
EMU_INSTRUCTION void ldmatrix_x2(A& a, B& b, uint32_t address) {
  load_matrices<false>(address, a, b);
}
template <typename A>
EMU_INSTRUCTION void ldmatrix_x1(A& a, uint32_t address) {
  load_matrices<false>(address, a);
}
template <typename A, typename B, typename C, typename D>
EMU_INSTRUCTION void ldmatrix_x4_trans(A& a, B& b, C& c, D& d, uint32_t address) {
  load_matrices<true>(address, a, b, c, d);
}
template <typename A, typename B>
EMU_INSTRUCTION void ldmatrix_x2_trans(A& a, B& b, uint32_t address) {
  load_matrices<true>(address, a, b);
}
template <typename A>
EMU_INSTRUCTION void ldmatrix_x1_trans(A& a, uint32_t address) {
  load_matrices<true>(address, a);
}
template <typename... Word>
EMU_INSTRUCTION void stmatrix(uint32_t address, Word... in) {
  store_matrices<false>(address, in...);
}
template <typename... Word>
EMU_INSTRUCTION void stmatrix_trans(uint32_t address, Word... in) {
  store_matrices<true>(address, in...);
}

EMU_INSTRUCTION void movmatrix_trans(unsigned& out, unsigned in) {
  struct Arguments {
    uint32_t in, out;
  } mine{in, 0};
  collective("movmatrix", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    for (int row = 0; row < 8; ++row)
      for (int column = 0; column < 8; ++column) {
        const uint32_t word = static_cast<Arguments*>(lanes[row * 4 + column / 2])->in;
        static_cast<Arguments*>(lanes[column * 4 + row / 2])->out |= (word >> column % 2 * 16 & 0xffffu)
                                                                     << row % 2 * 16;
      }
  });
  out = mine.out;
}

template <bool Half>
EMU_INSTRUCTION void mma_k16(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                             uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  const float c[4] = {c0, c1, c2, c3};
  float d[4];
  warp_product(d, a, b, c, 16, Half);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
template <bool Half>
EMU_INSTRUCTION void mma_k8(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t b0, float c0,
                            float c1, float c2, float c3) {
  const uint32_t a[2] = {a0, a1};
  const float c[4] = {c0, c1, c2, c3};
  float d[4];
  warp_product(d, a, &b0, c, 8, Half);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

EMU_INSTRUCTION void cvt_half2(unsigned& out, float high, float low) {
  out = to_half(low) | unsigned(to_half(high)) << 16;
}
EMU_INSTRUCTION void cvt_bfloat162(unsigned& out, float high, float low) {
  out = to_bfloat16(low) | unsigned(to_bfloat16(high)) << 16;
}
EMU_INSTRUCTION void ex2(float& out, float in) { out = exp2f(in); }
EMU_INSTRUCTION void rcp(float& out, float in) { out = 1.f / in; }

template <typename... Word>
EMU_INSTRUCTION void st_shared(uint32_t address, Word... in) {
  const uint32_t words[] = {emu_bits<uint32_t>(in)...};
  store_shared(address, words, sizeof words);
}
template <typename Word>
EMU_INSTRUCTION void ld_shared(Word& out, uint32_t address) {
  static_assert(sizeof(Word) == 4);
  load_shared(address, &out, 4);
}
template <typename Word>
EMU_INSTRUCTION void ld_shared(Word& a, Word& b, uint32_t address) {
  Word words[2];
  load_shared(address, words, 8);
  a = words[0], b = words[1];
}
template <typename Word>
EMU_INSTRUCTION void ld_shared(Word& a, Word& b, Word& c, Word& d, uint32_t address) {
  Word words[4];
  load_shared(address, words, 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

EMU_INSTRUCTION void bar_sync(int id, int count = 0) { named_barrier(id, count, true); }
EMU_INSTRUCTION void bar_arrive(int id, int count) { named_barrier(id, count, false); }
EMU_INSTRUCTION void nothing() {}
EMU_INSTRUCTION void fence_proxy() { proxy_fence(); }
EMU_INSTRUCTION void wait_for_grids() { yield(); }

// The old value is gone: all bits set, which is NaN.
template <typename T>
EMU_INSTRUCTION void forget(T& value) {
  std::memset(&value, 0xff, sizeof value);
}

}  // namespace emu::ptx
