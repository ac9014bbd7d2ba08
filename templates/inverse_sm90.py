"""CUDA helper: inverses of 64 × 64 unit lower triangular matrices, one warp per value head, in registers.

16-bit blocks are kept as *fragments*: what a lane holds of a 16 × 16 block X is the same whether X is the left operand
of mma.m16n8k16 or Xᵀ the right one, and a rounded accumulator is again a fragment.  With products of the form
X Yᵀ alone, a merge R = −A₂₂ L₂₁ A₁₁ is P = A₁₁ᵀ L₂₁ᵀ followed by R = −A₂₂ Pᵀ: nothing passes through shared memory but
K Kᵀ, which all heads of a key head share.

The 8 × 8 diagonal blocks are inverted by forward substitution in fp32, one column per lane; three levels of merges
follow in fp16 with fp32 accumulators.  Entries of the inverse are entries of a product of contractions scaled by β, so
fp16 holds them; bf16 merges or a Neumann series lose digits on correlated keys.
"""

PRODUCT_PITCH = 72  # halves per row of K Kᵀ in fp16: 16-byte rows that walk through all banks
PRODUCT_BYTES = 64 * PRODUCT_PITCH * 2 + 8 * 8 * 8 * 4  # and its 8 × 8 diagonal blocks in fp32
STRIP_ROWS = 32  # rows of the result that a warp stages in shared memory at a time

INVERSE_CUDA = r"""
#include <tl_templates/cuda/common.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace qla {

constexpr int kPitch = 72;  // halves per row of K Kt

// The sequence that owns `slot`: the last n with bounds[n] / chunk + n <= slot; found by a warp, 32 probes at a time.
__device__ __forceinline__ int sequence_of_slot(const int* bounds, int num_sequences, int slot, int chunk) {
  int lane = threadIdx.x & 31, low = 0, size = num_sequences;
  while (size > 1) {
    int step = (size + 31) >> 5, probe = lane * step;
    bool reached = probe < size && bounds[low + probe] / chunk + low + probe <= slot;
    int last = max(__popc(__ballot_sync(0xffffffffu, reached)) - 1, 0) * step;
    low += last;
    size = min(step, size - last);
  }
  return low;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ unsigned half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned pack(float low, float high, const bfloat16_t*) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned pack(float low, float high, const half_t*) { return half_pair(low, high); }
__device__ __forceinline__ unsigned scale_pair(unsigned pair, half2 factor) {
  half2 product = __hmul2(*reinterpret_cast<half2*>(&pair), factor);
  return *reinterpret_cast<unsigned*>(&product);
}

__device__ __forceinline__ void load_matrices(unsigned* out, unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
}
__device__ __forceinline__ void load_transposed(unsigned* out, unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
}
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned* in) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3]) : "memory");
}
__device__ __forceinline__ unsigned transpose_8x8(unsigned matrix) {
  unsigned out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// acc <- acc + X Yt for 16 x 16 fragments; acc holds two n8 tiles.
__device__ __forceinline__ void multiply(float* acc, const unsigned* x, const unsigned* y) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[n * 4]), "+f"(acc[n * 4 + 1]), "+f"(acc[n * 4 + 2]), "+f"(acc[n * 4 + 3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[n]), "r"(y[n + 2]));
}
// acc <- rows 0..7: X0 Yt, rows 8..15: X1 Yt, for 8 x 8 fragments.
__device__ __forceinline__ void multiply_8x8(float* acc, unsigned x0, unsigned x1, unsigned y) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
               : "=f"(acc[0]), "=f"(acc[1]), "=f"(acc[2]), "=f"(acc[3]) : "r"(x0), "r"(x1), "r"(y), "f"(0.f));
}
// fragment <- -acc, rounded.
__device__ __forceinline__ void round_negated(unsigned* fragment, const float* acc) {
#pragma unroll
  for (int i = 0; i < 4; ++i) fragment[i] = half_pair(-acc[i * 2], -acc[i * 2 + 1]);
}

// tile <- rows and columns before `valid` of K Kt, from the m64n64 accumulators of a warp group: lower 16 x 16 blocks
// in fp16, then the 8 x 8 diagonal blocks in fp32.
__device__ __forceinline__ void store_products(float* kk, void* tile, int valid) {
  half* products = reinterpret_cast<half*>(tile);
  float* diagonal = reinterpret_cast<float*>(products + 64 * kPitch);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, row = lane >> 2;
  if (valid < 64) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (warp * 16 + row + (i & 2) * 4 >= valid) kk[i] = 0.f;
  }
  const int matrix = lane >> 3, matrix_row = warp * 16 + (matrix & 1) * 8 + (lane & 7);
  unsigned address = shared_address(products + matrix_row * kPitch + (matrix >> 1) * 8);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* block = kk + j * 8;
    if (j <= warp) {
      unsigned pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = half_pair(block[i * 2], block[i * 2 + 1]);
      store_matrices(address + j * 32, pairs);
    }
    if (j == warp) {
      float* cell = diagonal + warp * 128 + row * 8 + (lane & 3) * 2;
      *reinterpret_cast<float2*>(cell) = make_float2(block[0], block[1]);
      *reinterpret_cast<float2*>(cell + 64) = make_float2(block[6], block[7]);
    }
  }
}

// log_gates <- log2(e) times the running sum of 64 gates, by one warp.
__device__ __forceinline__ void scan_gates(const float* gates, float* log_gates) {
  const int lane = threadIdx.x & 31;
  float2 pair = *reinterpret_cast<const float2*>(gates + lane * 2);
  float sum = pair.x + pair.y;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    float before = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += before;
  }
  constexpr float kLog2E = 1.4426950408889634f;
  *reinterpret_cast<float2*>(log_gates + lane * 2) = make_float2((sum - pair.y) * kLog2E, sum * kLog2E);
}

// x <- column `column` of (I + L)^-1, L = diag(beta) times the strict lower triangle of an 8 x 8 block.
__device__ __forceinline__ void solve_column(const float* block, const float* beta, int column, float* x) {
  float b[8];
  *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(beta);
  *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(beta + 4);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float l[8], sum = 0.f;
    if (r > 0) *reinterpret_cast<float4*>(l) = *reinterpret_cast<const float4*>(block + r * 8);
    if (r > 4) *reinterpret_cast<float4*>(l + 4) = *reinterpret_cast<const float4*>(block + r * 8 + 4);
#pragma unroll
    for (int j = 0; j < r; ++j) sum = fmaf(l[j], x[j], sum);
    x[r] = fmaf(-b[r], sum, r == column ? 1.f : 0.f);
  }
}

// One half of a result on its way to memory: 32 rows of 2 x 32 columns, 64-byte swizzled.
template <typename Element>
struct Strip {
  unsigned address;
  const float* beta;

  // Block (i, j) of the half <- zero.
  __device__ __forceinline__ void clear(int i, int j) const {
    const unsigned zero[4] = {0u, 0u, 0u, 0u};
    store(i, j, zero);
  }
  // Block (i, j) <- acc, its columns scaled by beta.
  __device__ __forceinline__ void put(int i, int j, const float* acc) const {
    const Element* type = nullptr;
    const float* column_beta = beta + j * 16 + (threadIdx.x & 3) * 2;
    const float2 b0 = *reinterpret_cast<const float2*>(column_beta);
    const float2 b1 = *reinterpret_cast<const float2*>(column_beta + 8);
    const unsigned block[4] = {pack(acc[0] * b0.x, acc[1] * b0.y, type), pack(acc[2] * b0.x, acc[3] * b0.y, type),
                               pack(acc[4] * b1.x, acc[5] * b1.y, type), pack(acc[6] * b1.x, acc[7] * b1.y, type)};
    store(i, j, block);
  }
  __device__ __forceinline__ void put_fragment(int i, int j, const unsigned* fragment) const {
    float acc[8];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float2 both = __half22float2(*reinterpret_cast<const half2*>(fragment + m));
      acc[m * 2] = both.x, acc[m * 2 + 1] = both.y;
    }
    put(i, j, acc);
  }

 private:
  __device__ __forceinline__ void store(int i, int j, const unsigned* block) const {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, row = i * 16 + (matrix & 1) * 8 + (lane & 7);
    const int unit = (j & 1) * 2 + (matrix >> 1);
    store_matrices(address + (j >> 1) * 2048 + row * 64 + ((unit ^ ((lane >> 1) & 3)) << 4), block);
  }
};

// block <- block row i, block column j of L = diag(beta) K Kt.
__device__ __forceinline__ void load_lower(unsigned* block, const half* products, int i, int j, const float* beta) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3, row = i * 16 + (lane >> 2);
  load_matrices(block, shared_address(products + (i * 16 + (matrix & 1) * 8 + (lane & 7)) * kPitch + j * 16 +
                                      (matrix >> 1) * 8));
  const half2 upper = __float2half2_rn(beta[row]), lower = __float2half2_rn(beta[row + 8]);
  block[0] = scale_pair(block[0], upper);
  block[1] = scale_pair(block[1], lower);
  block[2] = scale_pair(block[2], upper);
  block[3] = scale_pair(block[3], lower);
}

// What the upper half of an inverse leaves for the lower one.
struct Carried {
  unsigned diag_t[2][4], r10_t[4];  // transposes of blocks (0, 0), (1, 1) and (1, 0)
  unsigned diag[2][4], r32[4];      // blocks (2, 2), (3, 3) and (3, 2)
};

// strip <- rows 0 .. 31, columns 0 .. 31, of (I + tril(diag(beta) K Kt, -1))^-1 diag(beta) of one value head, by one
// warp.
// tile: see store_products.  beta: [64], 0 for absent tokens.
template <typename Element>
__device__ __forceinline__ void invert_upper(const void* tile, const float* beta, Element* strip, unsigned* carried) {
  __syncwarp();  // the strip of the head before has been read
  Carried& rest = *reinterpret_cast<Carried*>(carried);
  const half* products = reinterpret_cast<const half*>(tile);
  const float* diagonal = reinterpret_cast<const float*>(products + 64 * kPitch);
  const int lane = threadIdx.x & 31, matrix = lane >> 3;
  const unsigned scratch = shared_address(strip);

  // 8 x 8: lane = (block mod 4, column).  Columns are written as rows: the scratch holds transposed blocks.
#pragma unroll
  for (int half_of_blocks = 0; half_of_blocks < 2; ++half_of_blocks) {
    int block = half_of_blocks * 4 + matrix;
    float x[8];
    solve_column(diagonal + block * 64, beta + block * 8, lane & 7, x);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(scratch + (half_of_blocks * 32 + lane) * 16),
                 "r"(half_pair(x[0], x[1])), "r"(half_pair(x[2], x[3])), "r"(half_pair(x[4], x[5])),
                 "r"(half_pair(x[6], x[7])) : "memory");
  }
  __syncwarp();
  unsigned small[8], small_t[8];  // the inverses of the 8 x 8 blocks and their transposes
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_matrices(small_t + i * 4, scratch + (i * 32 + lane) * 16);
    load_transposed(small + i * 4, scratch + (i * 32 + lane) * 16);
  }

  // 8 -> 16: the inverses of the 16 x 16 diagonal blocks and their transposes.
  unsigned diag[4][4], diag_t[4][4];
  {
    unsigned lower[4];
    load_matrices(lower, shared_address(products + (matrix * 16 + 8 + (lane & 7)) * kPitch + matrix * 16));
#pragma unroll
    for (int d = 0; d < 4; ++d)
      lower[d] = scale_pair(lower[d], __float2half2_rn(beta[d * 16 + 8 + (lane >> 2)]));
#pragma unroll
    for (int d = 0; d < 4; d += 2) {  // two blocks in the two row halves of a product
      float acc[4];
      unsigned p0, p1;
      multiply_8x8(acc, small_t[2 * d], small_t[2 * d + 2], lower[d]);
      p0 = half_pair(-acc[0], -acc[1]);
      multiply_8x8(acc, small_t[2 * d], small_t[2 * d + 2], lower[d + 1]);
      p1 = half_pair(-acc[2], -acc[3]);
      multiply_8x8(acc, small[2 * d + 1], small[2 * d + 3], p0);
      diag[d][1] = half_pair(acc[0], acc[1]);
      multiply_8x8(acc, small[2 * d + 1], small[2 * d + 3], p1);
      diag[d + 1][1] = half_pair(acc[2], acc[3]);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      diag[d][0] = small[2 * d], diag[d][2] = 0u, diag[d][3] = small[2 * d + 1];
      diag_t[d][0] = small_t[2 * d], diag_t[d][1] = 0u, diag_t[d][3] = small_t[2 * d + 1];
      diag_t[d][2] = transpose_8x8(diag[d][1]);
    }
  }

  // 16 -> 32: R of block (1, 0) and of block (3, 2).
  unsigned r10[4], r10_t[4], r32[4];
#pragma unroll
  for (int d = 0; d < 4; d += 2) {
    float acc[8] = {}, result[8] = {};
    unsigned lower[4], product[4], *r = d == 0 ? r10 : r32;
    load_lower(lower, products, d + 1, d, beta);
    multiply(acc, diag_t[d], lower);
    round_negated(product, acc);
    multiply(result, diag[d + 1], product);
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = half_pair(result[i * 2], result[i * 2 + 1]);
  }
  r10_t[0] = transpose_8x8(r10[0]);
  r10_t[1] = transpose_8x8(r10[2]);
  r10_t[2] = transpose_8x8(r10[1]);
  r10_t[3] = transpose_8x8(r10[3]);

  __syncwarp();  // the scratch has been read
  const Strip<Element> half_tile{scratch, beta};
  half_tile.put_fragment(0, 0, diag[0]);
  half_tile.put_fragment(1, 0, r10);
  half_tile.put_fragment(1, 1, diag[1]);
  half_tile.clear(0, 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rest.diag_t[0][i] = diag_t[0][i], rest.diag_t[1][i] = diag_t[1][i], rest.r10_t[i] = r10_t[i];
    rest.diag[0][i] = diag[2][i], rest.diag[1][i] = diag[3][i], rest.r32[i] = r32[i];
  }
}

// strip <- rows 32 .. 63, after `invert_upper`, once its strip has been read.
template <typename Element>
__device__ __forceinline__ void invert_lower(const void* tile, const float* beta, Element* strip,
                                             const unsigned* carried) {
  const Carried& rest = *reinterpret_cast<const Carried*>(carried);
  const half* products = reinterpret_cast<const half*>(tile);

  // 32 -> 64: P[j][i] = (A11t L21t) and R[i][j] = A22 (-P)t, block column j of A11, block row i of A22.
  unsigned product[2][2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned lower0[4], lower1[4];
    load_lower(lower0, products, 2 + i, 0, beta);
    load_lower(lower1, products, 2 + i, 1, beta);
    float acc0[8] = {}, acc1[8] = {};
    multiply(acc0, rest.diag_t[0], lower0);
    multiply(acc1, rest.diag_t[1], lower1);
    multiply(acc0, rest.r10_t, lower1);
    round_negated(product[0][i], acc0);
    round_negated(product[1][i], acc1);
  }

  __syncwarp();  // the strip has been read
  const Strip<Element> half_tile{shared_address(strip), beta};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float acc[8] = {};
    multiply(acc, rest.diag[0], product[j][0]);
    half_tile.put(0, j, acc);
  }
  half_tile.put_fragment(0, 2, rest.diag[0]);
  half_tile.clear(0, 3);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float acc[8] = {};
    multiply(acc, rest.r32, product[j][0]);
    multiply(acc, rest.diag[1], product[j][1]);
    half_tile.put(1, j, acc);
  }
  half_tile.put_fragment(1, 2, rest.r32);
  half_tile.put_fragment(1, 3, rest.diag[1]);
}

}  // namespace qla
"""
