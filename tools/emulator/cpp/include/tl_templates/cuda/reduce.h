#pragma once

#include "common.h"

namespace tl {

struct SumOp {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct MaxOp {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct MinOp {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
template <int Threads>
struct NamedBarrier {};

// Combines x over threads whose indices differ in the bits from Scale up to Threads, all in one warp.
template <typename Op, int Threads, int Scale, int Offset = 0, typename AnyBarrier = void>
struct AllReduce {
  static_assert(Threads <= 32, "reductions across warps are not modelled");
  template <typename T>
  static T run(T x, T* = nullptr) {
    for (int distance = Threads / 2; distance >= Scale; distance /= 2)
      x = Op()(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
  }
};

}  // namespace tl
