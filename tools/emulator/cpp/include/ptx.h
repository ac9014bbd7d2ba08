// What inline PTX does, one function per instruction; arguments are the operands in the order of the instruction.
#pragma once

#include "device.h"

namespace emu::ptx {

// Reads (or writes) 8 x 8 matrices of 16-bit elements: lanes 8 i .. 8 i + 7 bring the addresses of the rows of matrix i.
struct Matrices {
  uint32_t address;
  uint32_t registers[4];
  int count;
  bool transposed, store;
};
inline void move_matrices(void* const* lanes, uint32_t) {
  const Matrices& first = *static_cast<Matrices*>(lanes[0]);
  const char* who = first.store ? "stmatrix" : "ldmatrix";
  for (int matrix = 0; matrix < first.count; ++matrix)
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = static_cast<Matrices*>(lanes[matrix * 8 + row])->address;
      char* place = shared_pointer(address, 16, 16, who);
      for (int column = 0; column < 8; ++column) {
        const int r = first.transposed ? column : row, c = first.transposed ? row : column;
        uint32_t& word = static_cast<Matrices*>(lanes[r * 4 + c / 2])->registers[matrix];
        char* half = reinterpret_cast<char*>(&word) + c % 2 * 2;
        if (first.store) std::memcpy(place + column * 2, half, 2);
        else std::memcpy(half, place + column * 2, 2);
      }
    }
}

template <bool Transposed, typename... Word>
void load_matrices(uint32_t address, Word&... out) {
  Matrices mine{address, {}, sizeof...(out), Transposed, false};
  collective(Transposed ? "ldmatrix.trans" : "ldmatrix", 0xffffffffu, &mine, move_matrices);
  int i = 0;
  ((std::memcpy(&out, &mine.registers[i++], 4)), ...);
}
template <bool Transposed, typename... Word>
void store_matrices(uint32_t address, Word... in) {
  Matrices mine{address, {uint32_t(in)...}, sizeof...(in), Transposed, true};
  collective(Transposed ? "stmatrix.trans" : "stmatrix", 0xffffffffu, &mine, move_matrices);
}

template <typename A, typename B, typename C, typename D>
void ldmatrix_x4(A& a, B& b, C& c, D& d, uint32_t address) { load_matrices<false>(address, a, b, c, d); }
template <typename A, typename B>
void ldmatrix_x2(A& a, B& b, uint32_t address) { load_matrices<false>(address, a, b); }
template <typename A>
void ldmatrix_x1(A& a, uint32_t address) { load_matrices<false>(address, a); }
template <typename A, typename B, typename C, typename D>
void ldmatrix_x4_trans(A& a, B& b, C& c, D& d, uint32_t address) { load_matrices<true>(address, a, b, c, d); }
template <typename A, typename B>
void ldmatrix_x2_trans(A& a, B& b, uint32_t address) { load_matrices<true>(address, a, b); }
template <typename A>
void ldmatrix_x1_trans(A& a, uint32_t address) { load_matrices<true>(address, a); }
template <typename... Word>
void stmatrix(uint32_t address, Word... in) { store_matrices<false>(address, in...); }
template <typename... Word>
void stmatrix_trans(uint32_t address, Word... in) { store_matrices<true>(address, in...); }

inline void movmatrix_trans(unsigned& out, unsigned in) {
  struct Arguments {
    uint32_t in, out;
  } mine{in, 0};
  collective("movmatrix", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    for (int row = 0; row < 8; ++row)
      for (int column = 0; column < 8; ++column) {
        const uint32_t word = static_cast<Arguments*>(lanes[row * 4 + column / 2])->in;
        static_cast<Arguments*>(lanes[column * 4 + row / 2])->out |= (word >> column % 2 * 16 & 0xffffu) << row % 2 * 16;
      }
  });
  out = mine.out;
}

template <bool Half>
void mma_k16(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
             uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  const float c[4] = {c0, c1, c2, c3};
  float d[4];
  warp_product(d, a, b, c, 16, Half);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
template <bool Half>
void mma_k8(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t b0, float c0, float c1,
            float c2, float c3) {
  const uint32_t a[2] = {a0, a1};
  const float c[4] = {c0, c1, c2, c3};
  float d[4];
  warp_product(d, a, &b0, c, 8, Half);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

inline void cvt_half2(unsigned& out, float high, float low) { out = to_half(low) | unsigned(to_half(high)) << 16; }
inline void cvt_bfloat162(unsigned& out, float high, float low) {
  out = to_bfloat16(low) | unsigned(to_bfloat16(high)) << 16;
}
inline void ex2(float& out, float in) { out = exp2f(in); }
inline void rcp(float& out, float in) { out = 1.f / in; }

template <typename... Word>
void store_shared(uint32_t address, Word... in) {
  const uint32_t words[] = {emu_bits<uint32_t>(in)...};
  std::memcpy(shared_pointer(address, sizeof words, sizeof words, "st.shared"), words, sizeof words);
}
template <typename Word>
void load_shared(Word& out, uint32_t address) {
  static_assert(sizeof(Word) == 4);
  std::memcpy(&out, shared_pointer(address, 4, 4, "ld.shared"), 4);
}
template <typename Word>
void load_shared(Word& a, Word& b, uint32_t address) {
  const char* place = shared_pointer(address, 8, 8, "ld.shared.v2");
  std::memcpy(&a, place, 4), std::memcpy(&b, place + 4, 4);
}
template <typename Word>
void load_shared(Word& a, Word& b, Word& c, Word& d, uint32_t address) {
  const char* place = shared_pointer(address, 16, 16, "ld.shared.v4");
  std::memcpy(&a, place, 4), std::memcpy(&b, place + 4, 4), std::memcpy(&c, place + 8, 4), std::memcpy(&d, place + 12, 4);
}

inline void bar_sync(int id, int count = 0) { named_barrier(id, count, true); }
inline void bar_arrive(int id, int count) { named_barrier(id, count, false); }
inline void nothing() {}
inline void wait_for_grids() { yield(); }

// The old value is gone: all bits set, which is NaN.
template <typename T>
void forget(T& value) { std::memset(&value, 0xff, sizeof value); }

}  // namespace emu::ptx
