"""CUDA helper: inverse of a 64 × 64 unit lower triangular matrix by one warp group, in place in shared memory.

The 16 × 16 diagonal blocks are inverted by forward substitution in fp32; two levels of merges follow,
R = −A₂₂ L₂₁ A₁₁, computed transposed, Rᵀ = (A₁₁ᵀ L₂₁ᵀ)(−A₂₂ᵀ), because then the accumulator of the first product is,
after rounding to fp16, the register operand of the second.  Entries of the inverse are entries of a product of
contractions scaled by β, so fp16 holds them; bf16 merges or a Neumann series lose digits on correlated keys.
"""

INVERSE_PITCH = 72  # halves per row: 16-byte rows that walk through all banks

INVERSE_CUDA = r"""
#include <tl_templates/cuda/common.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace qla {

constexpr int kPitch = 72;

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

// Inverse of the 16 x 16 unit lower triangular block at `block`; lane c of the first 16 owns column c.
__device__ __forceinline__ void invert_diagonal(half* block) {
  int column = threadIdx.x & 15;
  float x[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) x[r] = r == column ? 1.f : 0.f;
#pragma unroll
  for (int r = 1; r < 16; ++r) {
    uint4 units[2];
    units[0] = *reinterpret_cast<const uint4*>(block + r * kPitch);
    units[1] = r > 8 ? *reinterpret_cast<const uint4*>(block + r * kPitch + 8) : units[0];
    const half2* pairs = reinterpret_cast<const half2*>(units);
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < r; ++j) {
      float l = j & 1 ? __high2float(pairs[j >> 1]) : __low2float(pairs[j >> 1]);
      sum = fmaf(l, x[j], sum);
    }
    x[r] -= sum;
  }
  __syncwarp();
  if ((threadIdx.x & 31) < 16) {
#pragma unroll
    for (int r = 0; r < 16; ++r) block[r * kPitch + column] = __float2half(x[r]);
  }
}

// work (strictly lower part L) <- (I + L)^-1, 64 x 64, by 128 threads; upper blocks are left as they are (zero).
__device__ __forceinline__ void invert_unit_lower(half* work) {
  int warp = (threadIdx.x >> 5) & 3;
  __syncthreads();
  invert_diagonal(work + warp * 16 * (kPitch + 1));
  __syncthreads();
  if (warp < 2) {
    half* block = work + warp * 32 * (kPitch + 1);
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
  int x = warp >> 1, y = warp & 1;  // this warp's 16 x 16 block of R: rows y, columns x
  float product[4][4] = {}, out_left[4] = {}, out_right[4] = {};
  half* lower = work + 32 * kPitch;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    unsigned a11[4];
    load_transposed(a11, work + m * 16 * kPitch + x * 16);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      unsigned l21[4];
      load_rows(l21, lower + n * 16 * kPitch + m * 16);
      mma_f16(product[2 * n], a11, l21[0], l21[1]);
      mma_f16(product[2 * n + 1], a11, l21[2], l21[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    unsigned operand[4], a22[4];
    negated_operand(operand, product[2 * n], product[2 * n + 1]);
    load_rows(a22, lower + y * 16 * kPitch + 32 + n * 16);
    mma_f16(out_left, operand, a22[0], a22[1]);
    mma_f16(out_right, operand, a22[2], a22[3]);
  }
  __syncthreads();
  store_transpose(lower + y * 16 * kPitch + x * 16, out_left, out_right);
  __syncthreads();
}

__device__ __forceinline__ unsigned pack(float low, float high, const bfloat16_t*) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned pack(float low, float high, const half_t*) { return half_pair(low, high); }

// out[64, 64] <- (I + tril(diag(beta) kk, -1))^-1 diag(beta); kk: m64n64 accumulators of K Kt.  Tokens from `valid`
// on are absent: beta is 0 there, and kk is not looked at.
template <typename Element>
__device__ __forceinline__ void inverse_of_chunk(const float* kk, void* work_bytes, const float* beta, Element* out,
                                                 int valid) {
  half* work = reinterpret_cast<half*>(work_bytes);
  int lane = threadIdx.x & 31, row0 = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int half_row = 0; half_row < 2; ++half_row) {
    int row = row0 + half_row * 8;
    float b = beta[row];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      int column = j * 8 + (lane & 3) * 2;
      float low = row > column && row < valid ? kk[j * 4 + half_row * 2] * b : 0.f;
      float high = row > column + 1 && row < valid ? kk[j * 4 + half_row * 2 + 1] * b : 0.f;
      *reinterpret_cast<unsigned*>(work + row * kPitch + column) = half_pair(low, high);
    }
  }
  invert_unit_lower(work);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int unit = threadIdx.x + i * 128, row = unit >> 3, column = (unit & 7) * 8;
    uint4 raw = *reinterpret_cast<const uint4*>(work + row * kPitch + column);
    const half2* pairs = reinterpret_cast<const half2*>(&raw);
    uint4 result;
    unsigned* words = reinterpret_cast<unsigned*>(&result);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 value = __half22float2(pairs[j]);
      words[j] = pack(value.x * beta[column + 2 * j], value.y * beta[column + 2 * j + 1], out);
    }
    *reinterpret_cast<uint4*>(out + unit * 8) = result;
  }
  __syncthreads();
}

}  // namespace qla
"""
