#pragma once

#include "../common.h"

namespace tl {

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TransposedA, bool TransposedB, int SignA = 1,
          int SignB = 1>
EMU_INSTRUCTION emu::Product wgmma_shape() {
  static_assert(A == B && C == DataType::kFloat32 && M == 64 && K == 16 && N % 8 == 0 && N <= 256);
  static_assert(A == DataType::kFloat16 || A == DataType::kBFloat16);
  emu::Product product{};
  product.columns = N;
  product.half = A == DataType::kFloat16;
  product.a_mn = TransposedA;
  product.b_mn = TransposedB;
  product.sign = SignA * SignB;
  return product;
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TransposedA, bool TransposedB, int SignA = 1,
          int SignB = 1>
EMU_INSTRUCTION void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool keep) {
  emu::Product product = wgmma_shape<A, B, C, M, N, K, TransposedA, TransposedB, SignA, SignB>();
  product.a = a;
  product.b = b;
  product.accumulators = reinterpret_cast<float*>(c);
  product.keep = keep;
  emu::product_issue(product);
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TransposedA, bool TransposedB, int SignA = 1,
          int SignB = 1>
EMU_INSTRUCTION void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, bool keep) {
  static_assert(!TransposedA);
  emu::Product product = wgmma_shape<A, B, C, M, N, K, TransposedA, TransposedB, SignA, SignB>();
  product.registers = a;
  product.b = b;
  product.accumulators = reinterpret_cast<float*>(c);
  product.keep = keep;
  emu::product_issue(product);
}

}  // namespace tl
