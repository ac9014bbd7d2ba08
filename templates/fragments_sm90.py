"""CUDA helpers that move tiles between swizzled shared memory and transposed WGMMA accumulators.

TileLang turns an element-wise transposed access into 32 scalar loads or stores per thread; one ldmatrix.trans or
stmatrix.trans per 16 × 16 block does the same.  Tiles are 128-byte swizzled: 64 columns of 2 bytes per row, the 16-byte
unit of column block b in row r sits at b ^ (r mod 8); wider tiles are side by side 64-column panels.
"""

DECAY_FLOATS = 256  # of one chunk, see write_gates

FRAGMENTS_CUDA = r"""
#include <tl_templates/cuda/common.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

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

// A state in device memory <-> 64 rows of its transpose in accumulators of `Columns` columns.
template <int Columns, int RowStride, int ColumnStride, typename State>
__device__ __forceinline__ State* state_place(State* state) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  return state + (warp * 16 + (lane >> 2)) * RowStride + (lane & 3) * 2 * ColumnStride;
}
template <int Columns, int RowStride, int ColumnStride, typename State>
__device__ __forceinline__ void load_state(float* acc, const State* state) {
  const State* place = state_place<Columns, RowStride, ColumnStride>(state);
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i)  // accumulators: 8 columns, then 8 rows, then neighbouring columns
    acc[i] = static_cast<float>(place[(i >> 1 & 1) * 8 * RowStride + ((i >> 2) * 8 + (i & 1)) * ColumnStride]);
}
template <int Columns, int RowStride, int ColumnStride, typename State>
__device__ __forceinline__ void save_state(const float* acc, State* state) {
  State* place = state_place<Columns, RowStride, ColumnStride>(state);
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i)
    place[(i >> 1 & 1) * 8 * RowStride + ((i >> 2) * 8 + (i & 1)) * ColumnStride] = static_cast<State>(acc[i]);
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

// factors <- factor[token] of the first 2 `Pairs` tokens (accumulator columns) of this thread; it has 16.
template <int Pairs>
__device__ __forceinline__ void load_factors(float* factors, const float* factor) {
#pragma unroll
  for (int j = 0; j < Pairs; ++j) {
    float2 pair = *reinterpret_cast<const float2*>(factor + j * 8 + (threadIdx.x & 3) * 2);
    factors[j * 2] = pair.x;
    factors[j * 2 + 1] = pair.y;
  }
}

// operand <- Vt - gamma * acc, rounded: a 64 x 64 accumulator (rows d_v, columns tokens) as register operand A.  Tokens
// from `valid` on become 0, whatever V holds there.  first: the first `Pairs` of gamma, see load_factors.
template <int Pairs, typename Element>
__device__ __forceinline__ void subtract_from_values(const float* acc, const unsigned* pairs, const float* first,
                                                     const float* gamma, int valid, Element* operand) {
  unsigned* words = reinterpret_cast<unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    float2 g = j < Pairs ? make_float2(first[j * 2], first[j * 2 + 1])
                         : *reinterpret_cast<const float2*>(gamma + j * 8 + (threadIdx.x & 3) * 2);
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

// Calls body<warp>(): the code of each warp of a group without branches, its position known at compile time.
template <typename Body>
__device__ __forceinline__ void by_warp(Body body) {
  switch ((threadIdx.x >> 5) & 3) {
    case 0: body(std::integral_constant<int, 0>()); break;
    case 1: body(std::integral_constant<int, 1>()); break;
    case 2: body(std::integral_constant<int, 2>()); break;
    default: body(std::integral_constant<int, 3>());
  }
}

// operand <- tril(acc), rounded: a 64 x 64 accumulator as the register operand A of the next product.
template <typename Element>
__device__ __forceinline__ void lower_operand(const float* acc, Element* operand) {
  int lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  unsigned* words = reinterpret_cast<unsigned*>(operand);
  const unsigned edge = column < row ? 0xffffffffu : column == row ? 0xffffu : 0u;  // of the diagonal 8 x 8 blocks
  by_warp([&](auto position) {
    constexpr int warp = decltype(position)::value;
#pragma unroll
    for (int word = 0; word < 16; ++word) {
      const int block = word >> 2, part = word & 3;  // parts of a 16 x 16 block: rows 0 and 8, then columns 8
      unsigned both = pack(acc[word * 2], acc[word * 2 + 1], operand);
      if (block == warp && (part == 0 || part == 3)) both &= edge;
      words[word] = block < warp || (block == warp && part != 2) ? both : 0u;
    }
  });
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

// The gates of one chunk, by one warp; lane l brings log_gamma of tokens 2 l and 2 l + 1.
// gamma <- 2^g, gamma_q <- scale 2^g, tail <- 2^(g_63 - g), log_gamma <- g, and decay <- the factors of
// scale 2^(g_r - g_c) below the diagonal 16 x 16 blocks, split at the block's first row m so that both are at most 1:
//   [0, 64)       scale 2^(g_r - g_m)
//   [64, 256)     2^(g_m - g_c) for m = 16, 32, 48 and c < m.
__device__ __forceinline__ void write_gates(const float* pair, float scale, float* gamma, float* gamma_q, float* tail,
                                            float* log_gamma, float* decay) {
  const int lane = threadIdx.x & 31, token = lane * 2;
  auto put = [&](float* out, float x, float y) { *reinterpret_cast<float2*>(out) = make_float2(x, y); };
  const float end = __shfl_sync(0xffffffffu, pair[1], 31), start = __shfl_sync(0xffffffffu, pair[0], lane & ~7);
  put(log_gamma + token, pair[0], pair[1]);
  const float x = exp2f(pair[0]), y = exp2f(pair[1]);
  put(gamma + token, x, y);
  put(gamma_q + token, x * scale, y * scale);
  put(tail + token, exp2f(end - pair[0]), exp2f(end - pair[1]));
  put(decay + token, exp2f(pair[0] - start) * scale, exp2f(pair[1] - start) * scale);
#pragma unroll
  for (int m = 16; m < 64; m += 16) {
    const float first = __shfl_sync(0xffffffffu, pair[0], m >> 1);
    if (token < m) put(decay + m * 4 + token, exp2f(first - pair[0]), exp2f(first - pair[1]));
  }
}

// pair <- log_gamma of this lane's two tokens, from device memory.
__device__ __forceinline__ void load_gates(float* pair, const float* log_gamma) {
  float2 loaded = *reinterpret_cast<const float2*>(log_gamma + (threadIdx.x & 31) * 2);
  pair[0] = loaded.x;
  pair[1] = loaded.y;
}

// factors <- scale 2^(g_r - g_c), 0 for c > r, at this thread's 8 places of its warp's diagonal block, and the factors
// of its two rows in `decay`.
__device__ __forceinline__ void diagonal_decay(float* factors, const float* log_gamma, const float* decay,
                                               float scale) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, row = lane >> 2, column = (lane & 3) * 2;
  const float* g = log_gamma + warp * 16;
  const float upper = g[row], lower = g[row + 8];
  const float2 left = *reinterpret_cast<const float2*>(g + column);
  const float2 right = *reinterpret_cast<const float2*>(g + column + 8);
  factors[0] = column <= row ? exp2f(upper - left.x) * scale : 0.f;
  factors[1] = column < row ? exp2f(upper - left.y) * scale : 0.f;
  factors[2] = exp2f(lower - left.x) * scale;
  factors[3] = exp2f(lower - left.y) * scale;
  factors[4] = factors[5] = 0.f;
  factors[6] = column <= row ? exp2f(lower - right.x) * scale : 0.f;
  factors[7] = column < row ? exp2f(lower - right.y) * scale : 0.f;
  factors[8] = decay[warp * 16 + row];
  factors[9] = decay[warp * 16 + 8 + row];
}

// tile[r, c] <- scale 2^(g_r - g_c) * acc[r, c] for c <= r, else 0; diagonal: see diagonal_decay.
template <typename Element>
__device__ __forceinline__ void store_decayed(const float* acc, const float* diagonal, const float* decay,
                                              Element* tile) {
  by_warp([&](auto position) {
    constexpr int warp = decltype(position)::value;
    const float* source = decay + warp * 64 + (threadIdx.x & 3) * 2;
    float2 columns[6];
#pragma unroll
    for (int i = 0; i < warp * 2; ++i) columns[i] = *reinterpret_cast<const float2*>(source + i * 8);
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // 16 columns
      unsigned pairs[4] = {0u, 0u, 0u, 0u};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // accumulator pairs: rows 0, 8, 0, 8 of two n8 tiles
        const float* value = acc + block * 8 + i * 2;
        if (block < warp) {
          const float2 column = columns[block * 2 + (i >> 1)];
          const float row = diagonal[8 + (i & 1)];
          pairs[i] = pack(value[0] * (row * column.x), value[1] * (row * column.y), tile);
        } else if (block == warp) {
          pairs[i] = pack(value[0] * diagonal[i * 2], value[1] * diagonal[i * 2 + 1], tile);
        }
      }
      store_block(pairs, tile, block * 16);
    }
  });
}

// factor <- factors of this thread's two rows of a 64 x 64 accumulator.
__device__ __forceinline__ void load_row_factors(float* factor, const float* factors) {
  int row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
  factor[0] = factors[row];
  factor[1] = factors[row + 8];
}

// tile[r, column0 + c] <- factor[r] * acc[r, c]; factor: see load_row_factors.
template <typename Element>
__device__ __forceinline__ void store_scaled_rows(const float* acc, const float* factor, Element* tile, int column0) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* value = acc + block * 8 + j * 4;
      pairs[j * 2] = pack(value[0] * factor[0], value[1] * factor[0], tile);
      pairs[j * 2 + 1] = pack(value[2] * factor[1], value[3] * factor[1], tile);
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

// 128 units of 16 bytes from `units` on <- 0, by one warp group.
template <typename Element>
__device__ __forceinline__ void clear_units(Element* units) {
  *reinterpret_cast<uint4*>(units + (threadIdx.x & 127) * 8) = make_uint4(0, 0, 0, 0);
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
