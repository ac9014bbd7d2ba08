"""CUDA helper: inverses of 64 × 64 unit lower triangular matrices by one warp group, two value heads at a time.

The 16 × 16 diagonal blocks are inverted by forward substitution in fp32, one column per lane, one head per half warp;
two levels of merges follow,
R = −A₂₂ L₂₁ A₁₁, computed transposed, Rᵀ = (A₁₁ᵀ L₂₁ᵀ)(−A₂₂ᵀ), because then the accumulator of the first product is,
after rounding to fp16, the register operand of the second.  Entries of the inverse are entries of a product of
contractions scaled by β, so fp16 holds them; bf16 merges or a Neumann series lose digits on correlated keys.
"""

INVERSE_PITCH = 72  # halves per row of the fp16 work tile: 16-byte rows that walk through all banks
BASE_FLOATS = 4 * 2 * (16 * 20 + 16)  # fp32 scratch: a diagonal block per warp and head

INVERSE_CUDA = r"""
#include <tl_templates/cuda/common.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace qla {

constexpr int kPitch = 72;      // halves per row of work
constexpr int kBasePitch = 20;  // floats per column of a diagonal block: 4 column pairs x 8 rows hit all banks
constexpr int kBaseSize = 16 * kBasePitch + 16;  // + 16: the two heads of a warp read other banks

// The sequence that owns `slot`: the last n with bounds[n] / chunk + n <= slot.
__device__ __forceinline__ int sequence_of_slot(const int* bounds, int num_sequences, int slot, int chunk) {
  int low = 0, high = num_sequences - 1;
  while (low < high) {
    int middle = (low + high + 1) >> 1;
    if (bounds[middle] / chunk + middle <= slot) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ void mma_f16(float* acc, const unsigned* a, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The accumulators of two neighbouring n8 tiles, negated and rounded, as a 16 x 16 A operand.
__device__ __forceinline__ void negated_operand(unsigned* operand, const float* left, const float* right) {
  operand[0] = half_pair(-left[0], -left[1]);
  operand[1] = half_pair(-left[2], -left[3]);
  operand[2] = half_pair(-right[0], -right[1]);
  operand[3] = half_pair(-right[2], -right[3]);
}

// A 16 x 16 block at `block` (row pitch kPitch): as B operand of two n8 tiles (n = row of the block, k = column).
__device__ __forceinline__ void load_rows(unsigned* out, const half* block) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
  unsigned address = static_cast<unsigned>(
      __cvta_generic_to_shared(block + ((matrix >> 1) * 8 + row) * kPitch + (matrix & 1) * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
}
// The transpose of a 16 x 16 block as A operand.
__device__ __forceinline__ void load_transposed(unsigned* out, const half* block) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
  unsigned address = static_cast<unsigned>(
      __cvta_generic_to_shared(block + ((matrix >> 1) * 8 + row) * kPitch + (matrix & 1) * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
}
// block <- transpose of the accumulators of two n8 tiles.
__device__ __forceinline__ void store_transpose(half* block, const float* left, const float* right) {
  int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
  unsigned address = static_cast<unsigned>(
      __cvta_generic_to_shared(block + ((matrix >> 1) * 8 + row) * kPitch + (matrix & 1) * 8));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(half_pair(left[0], left[1])), "r"(half_pair(left[2], left[3])),
               "r"(half_pair(right[0], right[1])), "r"(half_pair(right[2], right[3]))
               : "memory");
}

__device__ __forceinline__ unsigned pack(float low, float high, const bfloat16_t*) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned pack(float low, float high, const half_t*) { return half_pair(low, high); }

// x <- column `column` of (I + L)^-1 for a 16 x 16 strictly lower L whose column j is row j of `block` (fp32).  As soon
// as x[j] is known it is taken out of all later rows, so that the products of a step do not wait for one another.
__device__ __forceinline__ void solve_column(const float* block, int column, float* x) {
#pragma unroll
  for (int r = 0; r < 16; ++r) x[r] = r == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 15; ++j) {
    float l[16];
#pragma unroll
    for (int r = j / 4 * 4 + (j % 4 == 3) * 4; r < 16; r += 4)
      *reinterpret_cast<float4*>(l + r) = *reinterpret_cast<const float4*>(block + j * kBasePitch + r);
#pragma unroll
    for (int r = j + 1; r < 16; ++r) x[r] = fmaf(-l[r], x[j], x[r]);
  }
}

// out[h] <- (I + tril(diag(beta_h) kk, -1))^-1 diag(beta_h) for `Heads` (1 or 2) value heads of a chunk; 128 threads.
// kk: m64n64 accumulators of K Kt.  beta: [Heads][64].  work_tiles: fp16 [Heads][64][kPitch].  scratch: fp32 diagonal
// blocks.  out: 64 x 64 tiles of consecutive heads.  Tokens from `valid` on are absent: beta is 0, kk not looked at.
template <int Heads, typename Element>
__device__ __forceinline__ void inverse_of_heads(const float* kk, void* work_tiles, void* scratch, const float* beta,
                                                 Element* out, int valid) {
  half* work = reinterpret_cast<half*>(work_tiles);
  float* base = reinterpret_cast<float*>(scratch);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, group_row = lane >> 2, pair = (lane & 3) * 2;
  base += warp * 2 * kBaseSize;
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int row = warp * 16 + group_row + i * 8;
      float b = beta[h * 64 + row];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float low = kk[j * 4 + i * 2], high = kk[j * 4 + i * 2 + 1];
        if (j >> 1 < warp) {
          unsigned both = row < valid ? half_pair(low * b, high * b) : 0u;
          *reinterpret_cast<unsigned*>(work + (h * 64 + row) * kPitch + j * 8 + pair) = both;
        } else if (j >> 1 == warp) {
          int column = (j & 1) * 8 + pair, local = group_row + i * 8;
          low = column < local && row < valid ? low * b : 0.f;
          high = column + 1 < local && row < valid ? high * b : 0.f;
          float* cell = base + h * kBaseSize + column * kBasePitch + local;  // transposed: see solve_column
          cell[0] = low;
          cell[kBasePitch] = high;
        }
      }
    }
  }
  __syncwarp();
  {
    int h = Heads == 2 ? lane >> 4 : 0, column = lane & 15;
    float x[16];
    solve_column(base + h * kBaseSize, column, x);
    half* block = work + (h * 64 + warp * 16) * kPitch + warp * 16 + column;
    if (Heads == 2 || lane < 16) {
#pragma unroll
      for (int r = 0; r < 16; ++r) block[r * kPitch] = __float2half(x[r]);
    }
  }
  __syncthreads();
  if (warp < 2 * Heads) {  // 16 -> 32: two merges per head
    half* block = work + ((warp >> 1) * 64 + (warp & 1) * 32) * kPitch + (warp & 1) * 32;
    half* lower = block + 16 * kPitch;
    unsigned a11[4], l21[4], a22[4], product[4];
    float left[4] = {}, right[4] = {}, out_left[4] = {}, out_right[4] = {};
    load_transposed(a11, block);
    load_rows(l21, lower);
    mma_f16(left, a11, l21[0], l21[1]);
    mma_f16(right, a11, l21[2], l21[3]);
    negated_operand(product, left, right);
    load_rows(a22, lower + 16);
    mma_f16(out_left, product, a22[0], a22[1]);
    mma_f16(out_right, product, a22[2], a22[3]);
    store_transpose(lower, out_left, out_right);
  }
  __syncthreads();
  const int x = warp >> 1, y = warp & 1;  // 32 -> 64: this warp's 16 x 16 block of R has rows y, columns x
  float out_left[Heads][4] = {}, out_right[Heads][4] = {};
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    half* upper = work + h * 64 * kPitch;
    half* lower = upper + 32 * kPitch;
    float product[4][4] = {};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (m < x) continue;  // A11 is lower triangular
      unsigned a11[4];
      load_transposed(a11, upper + m * 16 * kPitch + x * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (n > y) continue;  // so is A22
        unsigned l21[4];
        load_rows(l21, lower + n * 16 * kPitch + m * 16);
        mma_f16(product[2 * n], a11, l21[0], l21[1]);
        mma_f16(product[2 * n + 1], a11, l21[2], l21[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n > y) continue;
      unsigned operand[4], a22[4];
      negated_operand(operand, product[2 * n], product[2 * n + 1]);
      load_rows(a22, lower + y * 16 * kPitch + 32 + n * 16);
      mma_f16(out_left[h], operand, a22[0], a22[1]);
      mma_f16(out_right[h], operand, a22[2], a22[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < Heads; ++h)
    store_transpose(work + (h * 64 + 32 + y * 16) * kPitch + x * 16, out_left[h], out_right[h]);
  __syncthreads();
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // one 16 x 16 block per warp and step: (row block i, column block warp)
      int row = i * 16 + (lane >> 1), column = warp * 16 + (lane & 1) * 8;
      uint4 result = make_uint4(0u, 0u, 0u, 0u);
      if (warp <= i) {
        uint4 raw = *reinterpret_cast<const uint4*>(work + (h * 64 + row) * kPitch + column);
        float b[8];
        *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(beta + h * 64 + column);
        *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(beta + h * 64 + column + 4);
        const half2* pairs = reinterpret_cast<const half2*>(&raw);
        float2 v0 = __half22float2(pairs[0]), v1 = __half22float2(pairs[1]);
        float2 v2 = __half22float2(pairs[2]), v3 = __half22float2(pairs[3]);
        result.x = pack(v0.x * b[0], v0.y * b[1], out);
        result.y = pack(v1.x * b[2], v1.y * b[3], out);
        result.z = pack(v2.x * b[4], v2.y * b[5], out);
        result.w = pack(v3.x * b[6], v3.y * b[7], out);
      }
      *reinterpret_cast<uint4*>(out + h * 4096 + row * 64 + column) = result;
    }
  }
  __syncthreads();
}

}  // namespace qla
"""
