"""CUDA helpers that move tiles between swizzled shared memory and transposed WGMMA accumulators.

TileLang turns an element-wise transposed access into 32 scalar loads or stores per thread; one ldmatrix.trans or
stmatrix.trans per 16 × 16 block does the same.  Tiles are 128-byte swizzled: 64 columns of 2 bytes per row, the 16-byte
unit of column block b in row r sits at b ^ (r mod 8); wider tiles are side by side 64-column panels.
"""

FRAGMENTS_CUDA = r"""
#include <tl_templates/cuda/common.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace qla {

// Address of the 16-byte unit that holds (token, column) of a swizzled [64, width] tile.
template <typename Element>
__device__ __forceinline__ unsigned unit_address(const Element* tile, int token, int column) {
  const Element* unit = tile + (column >> 6) * 4096 + token * 64 + ((((column & 63) >> 3) ^ (token & 7)) << 3);
  return static_cast<unsigned>(__cvta_generic_to_shared(unit));
}

__device__ __forceinline__ float2 unpack(unsigned pair, const bfloat16_t*) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(unsigned pair, const half_t*) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
__device__ __forceinline__ unsigned pack(float low, float high, const bfloat16_t*) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned pack(float low, float high, const half_t*) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// acc <- Vt - gamma * acc for 16 columns of d_v starting at `column0` (acc: m64n64 accumulator, rows d_v, columns
// tokens); tokens from `valid` on are set to 0, whatever V holds there.
template <typename Element>
__device__ __forceinline__ void subtract_from_values(float* acc, const Element* values, const float* gamma, int column0,
                                                     int valid) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned address = unit_address(values, block * 16 + (matrix >> 1) * 8 + row, column0 + (matrix & 1) * 8);
    unsigned pairs[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(address));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int token = block * 16 + (j >> 1) * 8 + (lane & 3) * 2;
      float2 g = *reinterpret_cast<const float2*>(gamma + token);
      float2 value = unpack(pairs[j], values);
      float* pair = acc + (block * 4 + j) * 2;
      pair[0] = value.x - g.x * pair[0];
      pair[1] = value.y - g.y * pair[1];
    }
  }
  if (valid < 64) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      int token = (j >> 1) * 8 + (lane & 3) * 2;
      if (token >= valid) acc[j * 2] = 0.f;
      if (token + 1 >= valid) acc[j * 2 + 1] = 0.f;
    }
  }
}

// tile[token, column] <- acc[column, token] for 16 columns starting at `column0`.
template <typename Element>
__device__ __forceinline__ void store_transposed(const float* acc, Element* tile, int column0) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned address = unit_address(tile, block * 16 + (matrix >> 1) * 8 + row, column0 + (matrix & 1) * 8);
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = pack(acc[(block * 4 + j) * 2], acc[(block * 4 + j) * 2 + 1], tile);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
}

// Rows from `valid` on of a [64, width] tile <- 0, by one warp group.
template <typename Element>
__device__ __forceinline__ void clear_rows(Element* tile, int width, int valid) {
  int unit = threadIdx.x & 7;
#pragma unroll 1
  for (int row = valid + ((threadIdx.x & 127) >> 3); row < 64; row += 16) {
    for (int panel = 0; panel < width / 64; ++panel)
      *reinterpret_cast<uint4*>(tile + panel * 4096 + row * 64 + unit * 8) = make_uint4(0, 0, 0, 0);
  }
}

// Rows before `valid` of a [64, 64] tile -> device memory with row pitch `stride`, by one warp.
template <typename Element>
__device__ __forceinline__ void store_rows(const Element* tile, Element* out, int stride, int valid) {
  int lane = threadIdx.x & 31, unit = lane & 7;
#pragma unroll 1
  for (int row = lane >> 3; row < valid; row += 4) {
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * stride + unit * 8) =
        *reinterpret_cast<const uint4*>(tile + row * 64 + ((unit ^ (row & 7)) << 3));
  }
}

}  // namespace qla
"""
