"""CUDA helpers of `backward_grad_sm90`: what is done with accumulators between its products.

Beyond `fragments_sm90`.  A thread's accumulators of 64 rows come in pairs of neighbouring columns: pair (j, i) is row
8 i + lane / 4 of its warp's 16, columns 8 j + 2 (lane mod 4) and the next.  Warp w has rows from 16 w, so pair (j, i)
of a 64 × 64 product is below the diagonal 8 × 8 blocks for j < 2 w + i, in one for j = 2 w + i, and else above.
"""


class Gate:
    """Rows of the `gates` array; 64 floats each, one per token."""

    LOG_GAMMA, GAMMA, GAMMA_Q, TAIL, TAIL_BETA, BETA = range(6)  # log₂ γ, γ, scale γ, γ_C/γ, β γ_C/γ, β
    COUNT = 6


class Sum:
    """Rows of the `sums` array, 64 floats each, one per token but for the last."""

    COLUMNS = 0  # four: of the strictly lower X, over the rows of each warp
    DIAGONAL = 4  # of X
    ROWS = 5  # of M
    QUERY_DOTS = 6  # rows of Q with scale γ dO Sᵀ
    RESIDUAL_DOTS = 7  # rows of K with γ Z Sᵀ
    STATE_DOTS = 8  # rows of K with γ_C/γ E dSᵀ
    STATE_PRODUCT = 9  # ⟨S, dS⟩ in two parts
    COUNT = 10


GRADIENTS_CUDA = r"""
namespace qla {

// list <- (slot, first token, tokens) of the chunks in `Slots` slots from `first_slot` on, then how many there are.
// By the whole CTA, a warp each slot.  The sequence of a slot is the last n with bounds[n] / 64 + n <= slot.
template <int Slots>
__device__ __forceinline__ void find_chunks(const int* bounds, int num_sequences, int first_slot, int num_slots,
                                            int* list) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slot = first_slot + warp;
  if (warp < Slots) {
    int low = 0, high = num_sequences, token = 0, tokens = 0;
    if (slot < num_slots && num_sequences > 0) {
      while (high - low > 1) {
        const int step = (high - low + 31) >> 5, probe = low + lane * step;
        const bool reached = probe < high && bounds[probe] / 64 + probe <= slot;
        low += (__popc(__ballot_sync(0xffffffffu, reached)) - 1) * step;
        high = min(low + step, high);
      }
      token = bounds[low] + (slot - bounds[low] / 64 - low) * 64;
      tokens = min(bounds[low + 1] - token, 64);
    }
    if (lane == 0) {
      list[warp * 3] = slot;
      list[warp * 3 + 1] = token;
      list[warp * 3 + 2] = tokens;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int count = 0;
    for (int i = 0; i < Slots; ++i) {
      if (list[i * 3 + 2] <= 0) continue;
      for (int j = 0; j < 3; ++j) list[count * 3 + j] = list[i * 3 + j];
      ++count;
    }
    list[Slots * 3] = count;
  }
  __syncthreads();
}

// Rows from `valid` on of a [64, width] tile <- 0, by one warp.
template <typename Element>
__device__ __forceinline__ void clear_rows_by_warp(Element* tile, int width, int valid) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int row = valid + (lane >> 3); row < 64; row += 4) {
    for (int panel = 0; panel < width / 64; ++panel)
      *reinterpret_cast<uint4*>(tile + panel * 4096 + row * 64 + (lane & 7) * 8) = make_uint4(0, 0, 0, 0);
  }
}

// The gates of one chunk and head, by one warp; lane l has tokens 2 l and 2 l + 1.  beta: of the chunk's first token,
// `pitch` floats from token to token; 0 from token `valid` on.
__device__ __forceinline__ void write_head_gates(const float* log_gamma, const float* beta, int pitch, int valid,
                                                 float scale, float* gates) {
  const int token = (threadIdx.x & 31) * 2;
  auto put = [&](int row, float x, float y) {
    *reinterpret_cast<float2*>(gates + row * 64 + token) = make_float2(x, y);
  };
  const float2 g = *reinterpret_cast<const float2*>(log_gamma + token);
  const float b0 = token < valid ? beta[static_cast<int64_t>(token) * pitch] : 0.f;
  const float b1 = token + 1 < valid ? beta[static_cast<int64_t>(token + 1) * pitch] : 0.f;
  const float end = __shfl_sync(0xffffffffu, g.y, 31);
  __syncwarp();  // every lane has read the gates that these take the place of
  const float gamma0 = exp2f(g.x), gamma1 = exp2f(g.y), tail0 = exp2f(end - g.x), tail1 = exp2f(end - g.y);
  put(0, g.x, g.y);
  put(1, gamma0, gamma1);
  put(2, gamma0 * scale, gamma1 * scale);
  put(3, tail0, tail1);
  put(4, tail0 * b0, tail1 * b1);
  put(5, b0, b1);
}

// Calls body(j, i, diagonal) for the pairs of this warp that are not above the diagonal blocks, and above(j, i).
template <typename Body, typename Above>
__device__ __forceinline__ void each_lower(Body body, Above above) {
  by_warp([&](auto position) {
    constexpr int warp = decltype(position)::value;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (j > 2 * warp + i) above(j, i);
        else body(j, i, j == 2 * warp + i);
      }
    }
  });
}

// Where this thread's pair is in a diagonal block: the distance of its first column from the row.
__device__ __forceinline__ int from_diagonal() { return (threadIdx.x & 3) * 2 - ((threadIdx.x & 31) >> 2); }

__device__ __forceinline__ float2 load_pair(const float* row, int j) {
  return *reinterpret_cast<const float2*>(row + j * 8 + (threadIdx.x & 3) * 2);
}

// decay[r, c] <- 2^(g_r - g_c) for c <= r, else 0, as accumulators.
__device__ __forceinline__ void decay_factors(float* decay, const float* log_gamma) {
  const int row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2), off = from_diagonal();
  const float g[2] = {log_gamma[row], log_gamma[row + 8]};
  each_lower(
      [&](int j, int i, bool diagonal) {
        const float2 column = load_pair(log_gamma, j);
        const float x = exp2f(g[i] - column.x), y = exp2f(g[i] - column.y);
        decay[j * 4 + i * 2] = !diagonal || off <= 0 ? x : 0.f;
        decay[j * 4 + i * 2 + 1] = !diagonal || off < 0 ? y : 0.f;
      },
      [&](int j, int i) { decay[j * 4 + i * 2] = decay[j * 4 + i * 2 + 1] = 0.f; });
}

// Address of this lane's row in a 16 x 16 block of a swizzled tile, for matrix loads and stores: columns 0 .. 15 of
// this warp's rows.  Block b of the panel is at address ^ 32 b.  Hidden from the compiler, which would otherwise keep
// the addresses of all blocks in registers from one use to the next.
template <typename Element>
__device__ __forceinline__ unsigned rows_address(const Element* tile) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3;
  const int row = ((threadIdx.x >> 5) & 3) * 16 + (matrix & 1) * 8 + (lane & 7);
  unsigned address = unit_address(tile, row, (matrix >> 1) * 8);
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ void store_matrices(unsigned address, const unsigned* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// tile <- dP = scale tril(D1)∘decay∘beta_column;  scores <- X = scale scores∘decay∘D1, below and on the diagonal.
template <typename Element>
__device__ __forceinline__ void store_score_gradient(float* scores, const float* d1, const float* decay,
                                                     const float* beta, float scale, Element* tile) {
  unsigned words[16];
  each_lower(
      [&](int j, int i, bool diagonal) {
        const int n = j * 4 + i * 2;
        const float2 b = load_pair(beta, j);
        const float x = d1[n] * decay[n] * scale, y = d1[n + 1] * decay[n + 1] * scale;
        scores[n] *= x;
        scores[n + 1] *= y;
        words[j * 2 + i] = pack(x * b.x, y * b.y, tile);
      },
      [&](int j, int i) { words[j * 2 + i] = 0u; });
  const unsigned address = rows_address(tile);
#pragma unroll
  for (int block = 0; block < 4; ++block) store_matrices(address ^ (block * 32), words + block * 4);
}

__device__ __forceinline__ unsigned transpose_block(unsigned matrix) {
  unsigned out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// tile <- W + Wt for W = -tril(D2, -1)∘decay∘beta_column;  x <- x - overlap∘decay∘D2 below the diagonal.
template <typename Element>
__device__ __forceinline__ void store_key_gradient(float* x, const float* overlap, const float* d2, const float* decay,
                                                   const float* beta, Element* tile) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3, off = from_diagonal();
  const unsigned address = rows_address(tile);
  const int column = ((threadIdx.x >> 5) & 3) * 16 + (matrix & 1) * 8;
  unsigned turned = unit_address(tile, (matrix >> 1) * 8 + (lane & 7), column);  // of blocks below each other
  asm volatile("" : "+r"(turned));
  by_warp([&](auto position) {
    constexpr int warp = decltype(position)::value;
#pragma unroll
    for (int block = 0; block <= warp; ++block) {
      unsigned words[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int j = block * 2 + (part >> 1), i = part & 1, n = j * 4 + i * 2;
        if (j > 2 * warp + i) continue;
        const bool diagonal = j == 2 * warp + i;
        const float2 b = load_pair(beta, j);
        const float first = !diagonal || off < 0 ? -d2[n] * decay[n] : 0.f;
        const float second = !diagonal || off < -1 ? -d2[n + 1] * decay[n + 1] : 0.f;
        x[n] += overlap[n] * first;
        x[n + 1] += overlap[n + 1] * second;
        words[part] = pack(first * b.x, second * b.y, tile);
        if (diagonal) words[part] |= transpose_block(words[part]);  // 0 where the other is not
      }
      if (block == warp) {
        words[2] = transpose_block(words[1]);
      } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                         turned + block * 2048),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
      store_matrices(address ^ (block * 32), words);
    }
  });
}

// Of 2 `Half` sums of this lane and the one `Half` * 2 from it, their sums in the half that this lane's number names.
template <int Half>
__device__ __forceinline__ void keep_half(float* sums) {
  const bool upper = threadIdx.x & (Half * 2);
#pragma unroll
  for (int j = 0; j < Half; ++j) {
    const float kept = upper ? sums[Half + j] : sums[j], sent = upper ? sums[j] : sums[Half + j];
    sums[j] = kept + __shfl_xor_sync(0xffffffffu, sent, Half * 2);
  }
}

// Of a lower triangular accumulator x: sums over this warp's rows of each strictly lower column, the diagonal, and sums
// of strictly lower rows of x diag(beta).
__device__ __forceinline__ void sum_lower(const float* x, const float* beta, float* columns, float* diagonals,
                                          float* rows) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, off = from_diagonal();
  float column[16], row[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 16; ++j) column[j] = 0.f;
  each_lower(
      [&](int j, int i, bool diagonal) {
        const int n = j * 4 + i * 2;
        if (diagonal && (off == 0 || off == -1))
          diagonals[warp * 16 + i * 8 + (lane >> 2)] = off == 0 ? x[n] : x[n + 1];
        const float first = !diagonal || off < 0 ? x[n] : 0.f, second = !diagonal || off < -1 ? x[n + 1] : 0.f;
        const float2 b = load_pair(beta, j);
        column[j * 2] += first;
        column[j * 2 + 1] += second;
        row[i] += first * b.x + second * b.y;
      },
      [&](int, int) {});
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row[i] += __shfl_xor_sync(0xffffffffu, row[i], 1);
    row[i] += __shfl_xor_sync(0xffffffffu, row[i], 2);
    if ((lane & 3) == 0) rows[warp * 16 + i * 8 + (lane >> 2)] = row[i];
  }
  keep_half<8>(column);
  keep_half<4>(column);
  keep_half<2>(column);
  *reinterpret_cast<float2*>(columns + warp * 64 + (lane >> 2) * 8 + (lane & 3) * 2) =
      make_float2(column[0], column[1]);
}

// Of a [64, 64] accumulator, columns `column0` .. of a product:  sum[., column0 ..] <- sum + factor acc, and dots <-
// dots + rows of acc times rows of the tile.  factor, dots: of this thread's two rows.
template <typename Element>
__device__ __forceinline__ void add_scaled_rows(float* sum, const float* acc, const float* factor, const Element* tile,
                                                int column0, float* dots) {
  const unsigned address = rows_address(tile + column0 * 64);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned words[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address ^ (block * 32)));
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int n = block * 8 + part * 2, i = part & 1;
      const float2 other = unpack(words[part], tile);
      dots[i] += other.x * acc[n] + other.y * acc[n + 1];
      sum[column0 / 2 + n] += factor[i] * acc[n];
      sum[column0 / 2 + n + 1] += factor[i] * acc[n + 1];
    }
  }
}

// out[row] <- factors[row] dots, of this thread's two rows and those of its neighbours.
__device__ __forceinline__ void write_dots(const float* dots, const float* factors, float* out) {
  const int lane = threadIdx.x & 31, row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float dot = dots[i];
    dot += __shfl_xor_sync(0xffffffffu, dot, 1);
    dot += __shfl_xor_sync(0xffffffffu, dot, 2);
    if ((lane & 3) == 0) out[row + i * 8] = dot * factors[row + i * 8];
  }
}

// out[warp mod 2] <- this warp's half of <a, b> for two tiles of equal layout, by two neighbouring warps.
template <int Elements, typename Element>
__device__ __forceinline__ void dot_tiles(const Element* a, const Element* b, float* out) {
  float sum = 0.f;
#pragma unroll 2
  for (int unit = threadIdx.x & 63; unit < Elements / 8; unit += 64) {
    const uint4 x = *reinterpret_cast<const uint4*>(a + unit * 8), y = *reinterpret_cast<const uint4*>(b + unit * 8);
    const unsigned left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = unpack(left[i], a), q = unpack(right[i], a);
      sum += p.x * q.x + p.y * q.y;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) out[(threadIdx.x >> 5) & 1] = sum;
}

// Rows before `valid` of an accumulator -> device memory with row pitch `pitch`, rounded, 64 bytes of a row at a time.
template <int Columns, typename Element>
__device__ __forceinline__ void store_gradient(const float* acc, Element* out, int pitch, int valid) {
  const int lane = threadIdx.x & 31, quad = lane & 3, row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Element* place = out + static_cast<int64_t>(row + i * 8) * pitch + quad * 8;
#pragma unroll
    for (int group = 0; group < Columns / 32; ++group) {
      unsigned words[4];  // of columns 8 j + 2 quad; transposed among the four lanes: of columns 8 quad + 2 j
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pack(acc[group * 16 + j * 4 + i * 2], acc[group * 16 + j * 4 + i * 2 + 1], out);
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j & step) continue;
          const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? words[j] : words[j | step], step);
          words[j] = upper ? got : words[j];
          words[j | step] = upper ? words[j | step] : got;
        }
      }
      if (row + i * 8 < valid)
        *reinterpret_cast<uint4*>(place + group * 32) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Gradients of beta and of the gates of one chunk and head from `sums`, by one warp; lane l has tokens 2 l, 2 l + 1.
// dbeta, dg: of the chunk's first token, `pitch` floats from token to token.
__device__ __forceinline__ void write_gate_gradients(const float* sums, const float* gates, float* dbeta, float* dg,
                                                     int pitch, int valid) {
  const int lane = threadIdx.x & 31, token = lane * 2;
  auto get = [&](const float* array, int row) { return *reinterpret_cast<const float2*>(array + row * 64 + token); };
  float2 column = make_float2(0.f, 0.f);
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const float2 part = get(sums, warp);
    column.x += part.x;
    column.y += part.y;
  }
  const float2 diagonal = get(sums, 4), rows = get(sums, 5), of_query = get(sums, 6), of_residual = get(sums, 7);
  const float2 of_state = get(sums, 8), beta = get(gates, 5);
  const float2 kept = make_float2(beta.x * of_state.x, beta.y * of_state.y);
  const float first = of_query.x - of_residual.x - kept.x + rows.x - beta.x * column.x;
  const float second = of_query.y - of_residual.y - kept.y + rows.y - beta.y * column.y;
  float total = kept.x + kept.y;  // over all tokens
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  float after = first + second;  // from this lane's tokens on
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, after, step);
    if (lane + step < 32) after += other;
  }
  const float later = __shfl_down_sync(0xffffffffu, after, 1), next = lane < 31 ? later : 0.f;
  total += exp2f(gates[63]) * (sums[9 * 64] + sums[9 * 64 + 1]);
  const int64_t place = static_cast<int64_t>(token) * pitch;
  if (token < valid) {
    dbeta[place] = column.x + diagonal.x + of_state.x;
    dg[place] = after + total;
  }
  if (token + 1 < valid) {
    dbeta[place + pitch] = column.y + diagonal.y + of_state.y;
    dg[place + pitch] = second + next + total;
  }
}

}  // namespace qla
"""
