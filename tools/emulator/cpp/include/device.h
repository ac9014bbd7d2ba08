// CUDA C++ as far as generated kernels use it, on top of the machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "machine.h"

#define __device__
#define __global__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
// Of functions that stand for an instruction, so that its line is that of the kernel.
#define EMU_INSTRUCTION inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

// ---- Vectors

#define EMU_VECTOR(Type, Element, Alignment2, Alignment4)                              \
  struct alignas(sizeof(Element)) Type##1 { Element x; };                              \
  struct alignas(Alignment2) Type##2 { Element x, y; };                                \
  struct Type##3 { Element x, y, z; };                                                 \
  struct alignas(Alignment4) Type##4 { Element x, y, z, w; };                          \
  inline Type##1 make_##Type##1(Element x) { return {x}; }                             \
  inline Type##2 make_##Type##2(Element x, Element y) { return {x, y}; }               \
  inline Type##3 make_##Type##3(Element x, Element y, Element z) { return {x, y, z}; } \
  inline Type##4 make_##Type##4(Element x, Element y, Element z, Element w) { return {x, y, z, w}; }
EMU_VECTOR(char, signed char, 2, 4)
EMU_VECTOR(uchar, unsigned char, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(ushort, unsigned short, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(uint, unsigned int, 8, 16)
EMU_VECTOR(longlong, long long, 16, 16)
EMU_VECTOR(ulonglong, unsigned long long, 16, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

// ---- 16-bit floats: the type of the toolkit, and the one that TileLang takes from CUTLASS.

#define EMU_FLOAT16(Toolkit, Cutlass, from, to)                                           \
  struct Toolkit {                                                                        \
    uint16_t bits;                                                                        \
    Toolkit() = default;                                                                  \
    explicit Toolkit(float value) : bits(emu::to(value)) {}                               \
    operator float() const { return emu::from(bits); }                                    \
  };                                                                                      \
  struct Cutlass : Toolkit {                                                              \
    Cutlass() = default;                                                                  \
    explicit Cutlass(float value) : Toolkit(value) {}                                     \
    explicit Cutlass(double value) : Toolkit(float(value)) {}                             \
    explicit Cutlass(int value) : Toolkit(float(value)) {}                                \
    Cutlass(Toolkit value) : Toolkit(value) {}                                            \
  };                                                                                      \
  inline Cutlass operator+(Cutlass a, Cutlass b) { return Cutlass(float(a) + float(b)); } \
  inline Cutlass operator-(Cutlass a, Cutlass b) { return Cutlass(float(a) - float(b)); } \
  inline Cutlass operator*(Cutlass a, Cutlass b) { return Cutlass(float(a) * float(b)); } \
  inline Cutlass operator/(Cutlass a, Cutlass b) { return Cutlass(float(a) / float(b)); } \
  inline Cutlass operator-(Cutlass a) { return Cutlass(-float(a)); }                      \
  inline unsigned __pack_half2(Cutlass low, Cutlass high) { return low.bits | unsigned(high.bits) << 16; }
EMU_FLOAT16(__half, half_t, from_half, to_half)
EMU_FLOAT16(__nv_bfloat16, bfloat16_t, from_bfloat16, to_bfloat16)
#undef EMU_FLOAT16
inline unsigned __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) { return __pack_half2(low, high); }

struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat162 nv_bfloat162;
typedef __nv_bfloat16 nv_bfloat16;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {__half(float(a.x) * float(b.x)), __half(float(a.y) * float(b.y))};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
  return {__half(float(a.x) + float(b.x)), __half(float(a.y) + float(b.y))};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(float(a.x) * float(b.x)), __nv_bfloat16(float(a.y) * float(b.y))};
}

// ---- Arithmetic

template <typename A, typename B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> min(A a, B b) {
  return std::common_type_t<A, B>(b) < std::common_type_t<A, B>(a) ? b : a;
}
template <typename A, typename B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> max(A a, B b) {
  return std::common_type_t<A, B>(a) < std::common_type_t<A, B>(b) ? b : a;
}
template <typename To, typename From>
inline To emu_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1u) << (31 - i);
  return result;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
template <typename T>
inline T __ldg(const T* place) {
  return *place;
}

// ---- Threads

inline void __syncthreads() { emu::named_barrier(0, 0, true); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::sync_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emu::yield(); }
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() { emu::yield(); }
inline size_t __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
[[noreturn]] inline void __trap() { emu::fail("__trap was called"); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  struct Arguments {
    int predicate;
    unsigned result;
  } mine{predicate, 0};
  emu::collective("__ballot_sync", mask, &mine, [](void* const* lanes, uint32_t mask) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1 && static_cast<Arguments*>(lanes[i])->predicate) result |= 1u << i;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) static_cast<Arguments*>(lanes[i])->result = result;
  });
  return mine.result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __activemask() { return emu::whole_warp(); }

namespace emu {
// The value of lane `source`, or this lane's own if it has none.
template <typename T>
T shuffle(const char* what, unsigned mask, T value, int source) {
  struct Arguments {
    T value, result;
    int source;
  } mine{value, value, source};
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  collective(what, mask, &mine, [](void* const* lanes, uint32_t mask) {
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      Arguments& at = *static_cast<Arguments*>(lanes[i]);
      if (at.source < 0) continue;
      if (!(mask >> at.source & 1)) fail("a shuffle reads lane %d, which is not in its mask %#x", at.source, mask);
      at.result = static_cast<Arguments*>(lanes[at.source])->value;
    }
  });
  return mine.result;
}
}  // namespace emu

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emu::lane();
  return emu::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = emu::lane(), first = lane & ~(width - 1);
  return emu::shuffle("__shfl_up_sync", mask, value, lane - int(distance) >= first ? lane - int(distance) : -1);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = emu::lane(), end = (lane & ~(width - 1)) + width;
  return emu::shuffle("__shfl_down_sync", mask, value, lane + int(distance) < end ? lane + int(distance) : -1);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emu::lane(), other = lane ^ bits;
  return emu::shuffle("__shfl_xor_sync", mask, value, other < (lane & ~(width - 1)) + width ? other : -1);
}

template <typename T, typename U>
__attribute__((no_sanitize_thread)) T atomicAdd(T* place, U value) {
  T old = *place;
  *place = T(old + value);
  return old;
}
