"""What the Hopper kernels of the backward share: the parts of d_v, and operands in registers that leave as tiles."""

from qla_jit.config import Problem
from qla_jit.schedule import Rule, Schedule


def dv_tile(problem: Problem, schedule: Schedule) -> int:
    """Columns of d_v that one CTA owns."""
    return problem.head_dim_v // schedule["dv_split"]


def state_groups(problem: Problem, schedule: Schedule) -> int:
    """Warp groups that hold Sᵀ or dSᵀ, 64 rows of d_v each."""
    return dv_tile(problem, schedule) // 64


def _one_or_two_groups(problem: Problem, schedule: Schedule, arch) -> str | None:
    tile = dv_tile(problem, schedule)
    return f"head_dim_v / dv_split = {tile} is not 64 or 128" if tile not in (64, 128) else None


WHOLE_GROUPS = Rule("dv_tile_is_one_or_two_groups", _one_or_two_groups)

STORES_CUDA = r"""
namespace qla {

// A register operand A of `Columns` columns -> 64 rows of a swizzled tile, by one warp group.
template <int Columns, typename Element>
__device__ __forceinline__ void store_operand(const Element* operand, Element* tile) {
  const unsigned* words = reinterpret_cast<const unsigned*>(operand);
#pragma unroll
  for (int block = 0; block < Columns / 16; ++block) store_block(words + block * 4, tile, block * 16);
}

// A register operand A, 16 rows of this warp and 64 columns -> columns `column0` .. + 15 of a swizzled [64, 64] tile.
template <typename Operand, typename Element>
__device__ __forceinline__ void store_operand_transposed(const Operand* operand, Element* tile, int column0) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
  const unsigned* words = reinterpret_cast<const unsigned*>(operand);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const unsigned address = unit_address(tile, block * 16 + (matrix >> 1) * 8 + row, column0 + (matrix & 1) * 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(words[block * 4]), "r"(words[block * 4 + 1]), "r"(words[block * 4 + 2]), "r"(words[block * 4 + 3])
                 : "memory");
  }
}

// As lower_operand, without the diagonal.
template <typename Element>
__device__ __forceinline__ void below_diagonal_operand(const float* acc, Element* operand) {
  int lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  unsigned* words = reinterpret_cast<unsigned*>(operand);
  const unsigned edge = column + 1 < row ? 0xffffffffu : column < row ? 0xffffu : 0u;
  by_warp([&](auto position) {
    constexpr int warp = decltype(position)::value;
#pragma unroll
    for (int word = 0; word < 16; ++word) {
      const int block = word >> 2, part = word & 3;
      unsigned both = pack(acc[word * 2], acc[word * 2 + 1], operand);
      if (block == warp && (part == 0 || part == 3)) both &= edge;
      words[word] = block < warp || (block == warp && part != 2) ? both : 0u;
    }
  });
}

// acc <- Vt - gamma * acc, and operand the same, rounded; otherwise as subtract_from_values.
template <int Pairs, typename Element>
__device__ __forceinline__ void left_of_values(float* acc, const unsigned* pairs, const float* first,
                                               const float* gamma, int valid, Element* operand) {
  unsigned* words = reinterpret_cast<unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    const int token = j * 8 + (threadIdx.x & 3) * 2;
    const float2 g = j < Pairs ? make_float2(first[j * 2], first[j * 2 + 1])
                               : *reinterpret_cast<const float2*>(gamma + token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 value = unpack(pairs[(j >> 1) * 4 + (j & 1) * 2 + i], operand);
      float* out = acc + j * 4 + i * 2;
      out[0] = token < valid ? value.x - g.x * out[0] : 0.f;
      out[1] = token + 1 < valid ? value.y - g.y * out[1] : 0.f;
      words[j * 2 + i] = pack(out[0], out[1], operand);
    }
  }
}

// operand <- columns `column0` .. + 15 of a tile, transposed, for this warp: a register operand A whose rows are the
// tile's columns and whose columns are its 64 tokens.  Tokens from `valid` on become 0, whatever the tile holds there.
template <typename Element>
__device__ __forceinline__ void load_operand(Element* operand, const Element* tile, int column0, int valid) {
  unsigned* words = reinterpret_cast<unsigned*>(operand);
  load_values(words, tile, column0);
  if (valid < 64) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int token = (i >> 1) * 8 + (threadIdx.x & 3) * 2;
      if (token >= valid) words[i] = 0u;
      else if (token + 1 >= valid) words[i] &= 0xffffu;
    }
  }
}

// scaled <- factor[token] operand[., token], of register operands A whose columns are tokens.
template <typename Element>
__device__ __forceinline__ void scale_operand(const Element* operand, const float* factor, Element* scaled) {
  const unsigned* words = reinterpret_cast<const unsigned*>(operand);
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    const float2 f = *reinterpret_cast<const float2*>(factor + j * 8 + (threadIdx.x & 3) * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 value = unpack(words[j * 2 + i], operand);
      reinterpret_cast<unsigned*>(scaled)[j * 2 + i] = pack(f.x * value.x, f.y * value.y, scaled);
    }
  }
}

// words <- acc, negative <- -factor[token] acc[., token], both rounded: a 64 x 64 accumulator whose columns are tokens
// as two register operands A.
template <typename Element>
__device__ __forceinline__ void round_and_negate(const float* acc, const float* factor, unsigned* words,
                                                 Element* negative) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // 8 tokens
    const float2 f = *reinterpret_cast<const float2*>(factor + j * 8 + (threadIdx.x & 3) * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* value = acc + j * 4 + i * 2;
      words[j * 2 + i] = pack(value[0], value[1], negative);
      reinterpret_cast<unsigned*>(negative)[j * 2 + i] = pack(-f.x * value[0], -f.y * value[1], negative);
    }
  }
}

}  // namespace qla
"""
