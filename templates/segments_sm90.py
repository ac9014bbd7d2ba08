"""What the kernels of a split sequence share: who needs what, and where states pass from one kernel to the next.

States pass in the rows of `o` that a segment's own forward overwrites only after it has read them, so a split needs no
memory of its own.  The 64 columns of d_v that a state group owns are its *panel*; a token has 128 bytes in each.

| rows of a segment in `o`, in tokens | hold                                                                          |
| ----------------------------------- | ----------------------------------------------------------------------------- |
| 0 … 2 d_k − 1                       | the state it starts from, fp32, in accumulator order of each panel's group    |
| from 2 d_k on                       | D = M − γ I of the segment, transposed, as bf16 tiles [d_k, 64]: D rounded,   |
|                                     | then what that lost; tile e is in panel e mod (d_v / 64), the next ones below |

M is the transfer matrix, S ← M S + S*, and γ the product of the segment's gates.  D instead of M, because a direction
that no key touched has D = 0 and then passes in fp32; with M itself in 16 bits it would be rounded at every segment.
"""

from qla_jit.config import Problem

#: Columns of the table that lists segments: sequence, first chunk, number of chunks, and the segment that is the row's
#: turn in launch order.
SEGMENT_FIELDS = 4
SEQUENCE, FIRST, COUNT, TURN = range(SEGMENT_FIELDS)
#: Columns of the table of the segments that have to do with others, in launch order, with all that a CTA needs to know
#: about one in a single read: the segment, its sequence, first chunk, number of chunks, the sequence's first token, the
#: numbers of chunks of the segments before and after it, 0 for none, and of the sequence.
TURN_FIELDS = 8
OF_SEGMENT, OF_SEQUENCE, OF_FIRST, OF_COUNT, OF_TOKEN, OF_BEFORE, OF_AFTER, OF_CHUNKS = range(TURN_FIELDS)


def panels(problem: Problem) -> int:
    """64-column panels of d_v."""
    return problem.head_dim_v // 64


def state_tokens(problem: Problem) -> int:
    """Rows of `o` that the start state of a segment takes."""
    return 2 * problem.head_dim_k


def deviation_tile(problem: Problem, index: int) -> tuple[int, int]:
    """(first row in the segment, panel) of a tile of D: the d_k / 64 rounded ones, then as many of what that lost."""
    row, panel = index // panels(problem), index % panels(problem)
    return state_tokens(problem) + row * problem.head_dim_k, panel


def least_segment_tokens(problem: Problem) -> int:
    """Tokens that a segment with a successor has at least, so that what passes between kernels fits into its rows."""
    last_row, _ = deviation_tile(problem, 2 * problem.head_dim_k // 64 - 1)
    return last_row + problem.head_dim_k


SEGMENTS_CUDA = r"""
namespace qla {

// The fewest chunks before a segment whose gates sum to `tolerance` (log2) or less, if `limit` are enough, else -1.  By
// every warp alike.  gates: the last gate, for this head, of the segment's first chunk; `pitch` floats from chunk to
// chunk.  With the chunk before that one and -pitch: of the chunks from there on, as the backward asks.
__device__ __forceinline__ int warmup_chunks(const float* gates, int pitch, int limit, float tolerance) {
  const int lane = threadIdx.x & 31;
  float before = 0.f;
#pragma unroll 1
  for (int done = 0; done < limit; done += 32) {
    const int chunk = done + lane + 1;
    float sum = chunk <= limit ? gates[-static_cast<int64_t>(chunk) * pitch] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, chunk <= limit && before + sum <= tolerance);
    if (reached != 0u) return done + __ffs(reached);
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return -1;
}

// Orders what was stored to device memory before it with tensor copies that read it after.
__device__ __forceinline__ void fence_proxy_global() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The 16-byte unit `index` of this thread in the start state of its panel: 128 threads side by side, 8 units a token.
template <typename Element>
__device__ __forceinline__ float4* panel_unit(Element* panel, int pitch, int index) {
  const int unit = index * 128 + (threadIdx.x & 127);
  return reinterpret_cast<float4*>(panel + static_cast<int64_t>(unit >> 3) * pitch + (unit & 7) * 8);
}
template <int Columns, typename Element>
__device__ __forceinline__ void load_panel(float* acc, const Element* panel, int pitch) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    const float4 four = *panel_unit(const_cast<Element*>(panel), pitch, i);
    acc[i * 4] = four.x;
    acc[i * 4 + 1] = four.y;
    acc[i * 4 + 2] = four.z;
    acc[i * 4 + 3] = four.w;
  }
}
template <int Columns, typename Element>
__device__ __forceinline__ void save_panel(const float* acc, Element* panel, int pitch) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i)
    *panel_unit(panel, pitch, i) = make_float4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]);
}

// 64 columns of an accumulator, from its value `first` on -> a tile in device memory; what rounding lost -> another.
template <typename Element>
__device__ __forceinline__ void save_in_two(const float* acc, int first, Element* rounded, Element* lost, int pitch) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < 16; ++i) {  // 8 columns, then 8 rows
    const int row = warp * 16 + (i & 1) * 8 + (lane >> 2), column = (i >> 1) * 8 + (lane & 3) * 2;
    const int64_t place = static_cast<int64_t>(row) * pitch + column;
    const float* value = acc + first + i * 2;
    const unsigned both = pack(value[0], value[1], rounded);
    const float2 kept = unpack(both, rounded);
    *reinterpret_cast<unsigned*>(rounded + place) = both;
    *reinterpret_cast<unsigned*>(lost + place) = pack(value[0] - kept.x, value[1] - kept.y, lost);
  }
}

// The gates of one chunk, by one warp; lane l brings log_gamma of tokens 2 l and 2 l + 1.  gamma <- 2^g;
// tail <- 2^(g_63 - g); value_factor <- 1, or -2^(before + g) where values are keys.  Returns before + g_63.
__device__ __forceinline__ float write_state_gates(const float* pair, float before, int values_are_keys, float* gamma,
                                                   float* value_factor, float* tail) {
  const int token = (threadIdx.x & 31) * 2;
  auto put = [&](float* out, float x, float y) { *reinterpret_cast<float2*>(out + token) = make_float2(x, y); };
  const float end = __shfl_sync(0xffffffffu, pair[1], 31);
  put(gamma, exp2f(pair[0]), exp2f(pair[1]));
  put(tail, exp2f(end - pair[0]), exp2f(end - pair[1]));
  if (values_are_keys) put(value_factor, -exp2f(before + pair[0]), -exp2f(before + pair[1]));
  else put(value_factor, 1.f, 1.f);
  return before + end;
}

// operand <- factor Vt - gamma acc, rounded: a 64 x 64 accumulator (rows columns of V, columns tokens) as register
// operand A.  pairs: of load_values.
template <typename Element>
__device__ __forceinline__ void subtract_from_scaled(const float* acc, const unsigned* pairs, const float* factor,
                                                     const float* gamma, Element* operand) {
  unsigned* words = reinterpret_cast<unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    const int token = j * 8 + (threadIdx.x & 3) * 2;
    const float2 g = *reinterpret_cast<const float2*>(gamma + token);
    const float2 f = *reinterpret_cast<const float2*>(factor + token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 value = unpack(pairs[(j >> 1) * 4 + (j & 1) * 2 + i], operand);
      const float* old = acc + j * 4 + i * 2;
      words[j * 2 + i] = pack(f.x * value.x - g.x * old[0], f.y * value.y - g.y * old[1], operand);
    }
  }
}

// acc <- take ? factor acc + product + added : added, for accumulators of `Columns` columns.  A select, so that
// whatever acc and product hold where they do not count stays out.
template <int Columns>
__device__ __forceinline__ void advance(float* acc, const float* product, const float* added, float factor, int take) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) acc[i] = take ? factor * acc[i] + product[i] + added[i] : added[i];
}

}  // namespace qla
"""
