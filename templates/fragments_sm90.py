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

// Tells the compiler that the old values of an accumulator are not needed: the product that clears it names them as
// inputs, which would keep 32 registers alive through the whole loop.
__device__ __forceinline__ void forget(float* acc) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "=f"(acc[i]));
}

// Hides from the compiler where the values of a fragment come from.  Without it, an initial state in
// bf16 becomes the loop's first operand as it is, and ptxas then serialises every product (C7514).
template <int Count>
__device__ __forceinline__ void pin(float* fragment) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(fragment[i]));
}

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

// pairs <- columns `column0` .. + 15 of the value tile, transposed as accumulators hold it: rows d_v, columns tokens.
template <typename Element>
__device__ __forceinline__ void load_values(unsigned* pairs, const Element* values, int column0) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned address = unit_address(values, block * 16 + (matrix >> 1) * 8 + row, column0 + (matrix & 1) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pairs[block * 4]), "=r"(pairs[block * 4 + 1]), "=r"(pairs[block * 4 + 2]),
                   "=r"(pairs[block * 4 + 3])
                 : "r"(address));
  }
}

// factors <- factor[token] of the 16 tokens (accumulator columns) of this thread.
__device__ __forceinline__ void load_factors(float* factors, const float* factor) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float2 pair = *reinterpret_cast<const float2*>(factor + j * 8 + (threadIdx.x & 3) * 2);
    factors[j * 2] = pair.x;
    factors[j * 2 + 1] = pair.y;
  }
}

// operand <- Vt - gamma * acc, rounded: a 64 x 64 accumulator (rows d_v, columns tokens) as register operand A.  Tokens
// from `valid` on become 0, whatever V holds there.
template <typename Element>
__device__ __forceinline__ void subtract_from_values(const float* acc, const unsigned* pairs, const float* gamma,
                                                     int valid, Element* operand) {
  unsigned* words = reinterpret_cast<unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    float2 g = *reinterpret_cast<const float2*>(gamma + j * 8 + (threadIdx.x & 3) * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 value = unpack(pairs[(j >> 1) * 4 + (j & 1) * 2 + i], operand);
      const float* old = acc + j * 4 + i * 2;
      words[j * 2 + i] = pack(value.x - g.x * old[0], value.y - g.y * old[1], operand);
    }
  }
  if (valid < 64) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      int token = (j >> 1) * 8 + (threadIdx.x & 3) * 2;
      if (token >= valid) words[j] = 0u;
      else if (token + 1 >= valid) words[j] &= 0xffffu;
    }
  }
}

// acc[column, token] <- factors[token] * acc[column, token]; see load_factors.
__device__ __forceinline__ void scale_columns(float* acc, const float* factors) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    acc[j * 4] *= factors[j * 2];
    acc[j * 4 + 1] *= factors[j * 2 + 1];
    acc[j * 4 + 2] *= factors[j * 2];
    acc[j * 4 + 3] *= factors[j * 2 + 1];
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

// operand <- tril(acc), rounded: a 64 x 64 accumulator as the register operand A of the next product.
template <typename Element>
__device__ __forceinline__ void lower_operand(const float* acc, Element* operand) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  unsigned* words = reinterpret_cast<unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 columns; warp w has rows 16 w ..
    if (j >> 1 == warp) {
      int row = lane >> 2, column = (j & 1) * 8 + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float low = column <= row + 8 * i ? acc[j * 4 + 2 * i] : 0.f;
        float high = column + 1 <= row + 8 * i ? acc[j * 4 + 2 * i + 1] : 0.f;
        words[j * 2 + i] = pack(low, high, operand);
      }
    } else {
      bool below = j >> 1 < warp;
      words[j * 2] = below ? pack(acc[j * 4], acc[j * 4 + 1], operand) : 0u;
      words[j * 2 + 1] = below ? pack(acc[j * 4 + 2], acc[j * 4 + 3], operand) : 0u;
    }
  }
}

// Two neighbouring 16 x 8 accumulator blocks of this warp -> rows 16 warp .., columns `column` .. of a swizzled tile.
template <typename Element>
__device__ __forceinline__ void store_block(const unsigned* pairs, Element* tile, int column) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = ((threadIdx.x >> 5) & 3) * 16 + (matrix & 1) * 8 + (lane & 7);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   unit_address(tile, row, column + (matrix >> 1) * 8)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// tile[r, c] <- scale * 2^(log_gamma[r] - log_gamma[c]) * acc[r, c] for c <= r, else 0.  Below the diagonal block of a
// warp the factor splits at the block's first row m: 2^(g_r - g_m) 2^(g_m - g_c), both at most 1, few exponentials.
template <typename Element>
__device__ __forceinline__ void store_decayed(const float* acc, const float* log_gamma, float scale, Element* tile) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, row = lane >> 2, first = warp * 16;
  float start = log_gamma[first];
  float g0 = log_gamma[first + row], g1 = log_gamma[first + row + 8];
  float r0 = exp2f(g0 - start) * scale, r1 = exp2f(g1 - start) * scale;
#pragma unroll
  for (int block = 0; block < 4; ++block) {  // 16 columns
    unsigned pairs[4] = {0u, 0u, 0u, 0u};
    const float* value = acc + block * 8;
    const float* column_gamma = log_gamma + block * 16 + (lane & 3) * 2;
    if (block < warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 g = *reinterpret_cast<const float2*>(column_gamma + j * 8);
        float low = exp2f(start - g.x), high = exp2f(start - g.y);
        pairs[j * 2] = pack(value[j * 4] * (r0 * low), value[j * 4 + 1] * (r0 * high), tile);
        pairs[j * 2 + 1] = pack(value[j * 4 + 2] * (r1 * low), value[j * 4 + 3] * (r1 * high), tile);
      }
    } else if (block == warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = j * 8 + (lane & 3) * 2;
        float2 g = *reinterpret_cast<const float2*>(column_gamma + j * 8);
        float low0 = column <= row ? exp2f(g0 - g.x) * scale * value[j * 4] : 0.f;
        float high0 = column + 1 <= row ? exp2f(g0 - g.y) * scale * value[j * 4 + 1] : 0.f;
        float low1 = column <= row + 8 ? exp2f(g1 - g.x) * scale * value[j * 4 + 2] : 0.f;
        float high1 = column + 1 <= row + 8 ? exp2f(g1 - g.y) * scale * value[j * 4 + 3] : 0.f;
        pairs[j * 2] = pack(low0, high0, tile);
        pairs[j * 2 + 1] = pack(low1, high1, tile);
      }
    }
    store_block(pairs, tile, block * 16);
  }
}

// tile[r, column0 + c] <- factor[r] * acc[r, c].
template <typename Element>
__device__ __forceinline__ void store_scaled_rows(const float* acc, const float* factor, Element* tile, int column0) {
  int row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
  float f0 = factor[row], f1 = factor[row + 8];
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* value = acc + block * 8 + j * 4;
      pairs[j * 2] = pack(value[0] * f0, value[1] * f0, tile);
      pairs[j * 2 + 1] = pack(value[2] * f1, value[3] * f1, tile);
    }
    store_block(pairs, tile, column0 + block * 16);
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
