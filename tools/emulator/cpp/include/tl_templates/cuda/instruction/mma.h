#pragma once

#include "../common.h"

namespace tl {

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TransposedA, bool TransposedB>
EMU_INSTRUCTION void mma_sync(float* c, const uint32_t* a, const uint32_t* b) {
  static_assert(A == B && (A == DataType::kFloat16 || A == DataType::kBFloat16) && C == DataType::kFloat32);
  static_assert(M == 16 && N == 8 && (K == 8 || K == 16) && !TransposedA && TransposedB);
  emu::warp_product(c, a, b, c, K, A == DataType::kFloat16);
}

}  // namespace tl
