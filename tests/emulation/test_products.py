"""Warp group products against a plain product, for every layout that a descriptor can name, after tensor loads.

The kernels of this package use rows of 64 and 128 bytes; that these are right was seen on cards.
"""

import itertools

import pytest
import torch
from emulator import EmulationError, TensorMap

K, M, N = 64, 64, 64
SWIZZLES = {0: 0, 1: 3, 2: 2, 3: 1}  # of a tensor map: of a descriptor

TEXT = """
template <int Layout, int Width, bool AMn, bool BMn, tl::DataType Type>
__device__ void multiply(uchar* a_tile, uchar* b_tile, float* acc, bool from_registers) {{
  // Panels of `Width` bytes, 64 rows each; rows are M or N for K-major operands, else K.
  constexpr int kPanelA = 64 * Width, kPanelB = (BMn ? {K} : {N}) * Width, kAtom = 8 * Width;
  constexpr int kLeadA = AMn ? (Width == 16 ? kAtom : kPanelA) : kPanelA;
  constexpr int kStrideA = AMn && Width == 16 ? kPanelA : kAtom;
  constexpr int kLeadB = BMn ? (Width == 16 ? kAtom : kPanelB) : kPanelB;
  constexpr int kStrideB = BMn && Width == 16 ? kPanelB : kAtom;
  tl::GmmaDescriptor a, b;
  tl::initialize_wgmma_descriptor<Layout, (kLeadA >> 4), (kStrideA >> 4)>(a, a_tile);
  tl::initialize_wgmma_descriptor<Layout, (kLeadB >> 4), (kStrideB >> 4)>(b, b_tile);
  auto step = [](int k, bool mn, int panel) {{
    return mn ? k * 16 * Width : k * 32 / Width * panel + k * 32 % Width;
  }};
  uint32_t registers[4][4];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  if (from_registers)
    for (int k = 0; k < 4; ++k)
      for (int i = 0; i < 4; ++i)
        for (int pair = 0; pair < 2; ++pair) {{
          const int r = row + i % 2 * 8, c = k * 16 + i / 2 * 8 + column + pair;
          const uint16_t* element = reinterpret_cast<uint16_t*>(a_tile) + r * 64 + (c / 8 ^ r % 8) * 8 + c % 8;
          registers[k][i] = (pair ? registers[k][i] & 0xffffu : 0u) | unsigned(*element) << pair * 16;
        }}
  tl::warpgroup_arrive();
  for (int k = 0; k < 4; ++k) {{
    uint32_t* c = reinterpret_cast<uint32_t*>(acc);
    if (from_registers)
      tl::wgmma_rs<Type, Type, tl::DataType::kFloat32, 64, {N}, 16, false, BMn>(
          registers[k], uint64_t(b + (step(k, BMn, kPanelB) >> 4)), c, k > 0);
    else
      tl::wgmma_ss<Type, Type, tl::DataType::kFloat32, 64, {N}, 16, AMn, BMn>(
          uint64_t(a + (step(k, AMn, kPanelA) >> 4)), uint64_t(b + (step(k, BMn, kPanelB) >> 4)), c, k > 0);
  }}
  tl::warpgroup_commit_batch();
  {wait}
}}

extern "C" __global__ void run(__grid_constant__ const CUtensorMap a, __grid_constant__ const CUtensorMap b,
                               float* out, int layout, int width, int a_mn, int b_mn, int half, int from_registers) {{
  extern __shared__ __align__(1024) uchar tiles[];
  __shared__ uint64_t full_mem[1];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  uchar* b_tile = tiles + 64 * 64 * 2;
  if (threadIdx.x == 0) {{
    full[0].init(1);
    full[0].arrive_and_expect_tx((64 + {N}) * 64 * 2);
    for (int i = 0; i < 64 * 2 / width; ++i)
      tl::tma_load(a, full[0], tiles + i * 64 * width, i * width / 2, 0);
    for (int i = 0; i < (b_mn ? {N} : 64) * 2 / width; ++i)
      tl::tma_load(b, full[0], b_tile + i * (b_mn ? 64 : {N}) * width, i * width / 2, 0);
  }}
  __syncthreads();
  full[0].wait(0);
  float acc[{N} / 2];
  auto go = [&](auto type) {{
    constexpr tl::DataType kType = decltype(type)::value;
{variants}
  }};
  if (half) go(std::integral_constant<tl::DataType, tl::DataType::kFloat16>());
  else go(std::integral_constant<tl::DataType, tl::DataType::kBFloat16>());
  for (int i = 0; i < {N} / 2; ++i) {{
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    out[row * {N} + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = acc[i];
  }}
}}
"""
CALL = (
    "    if (layout == {layout} && a_mn == {a_mn} && b_mn == {b_mn})\n"
    "      multiply<{layout}, {width}, {a_mn}, {b_mn}, kType>(tiles, b_tile, acc, from_registers);"
)


def text(wait="tl::wait_wgmma<0>();", swizzles=SWIZZLES):
    variants = "\n".join(
        CALL.format(layout=swizzles[s], width=16 << s, a_mn=a_mn, b_mn=b_mn)
        for s, a_mn, b_mn in itertools.product(swizzles, (0, 1), (0, 1))
    )
    return TEXT.format(K=K, N=N, variants=variants, wait=wait)


def operand(rows, mn_major, swizzle, dtype, seed):
    """[rows, K] numbers, and the map of their tensor as it lies in memory."""
    numbers = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).to(dtype)
    stored = (numbers.mT if mn_major else numbers).contiguous()
    height, width = stored.shape
    panel = (16 << swizzle) // 2
    return numbers, TensorMap(stored, (width, height), (2, 2 * width), (panel, height), swizzle)


def error(program, swizzle, a_mn, b_mn, dtype, from_registers=0, seed=0):
    a, a_map = operand(M, a_mn, swizzle, dtype, 1)
    b, b_map = operand(N, b_mn, swizzle, dtype, 2)
    out = torch.full((M, N), float("nan"))
    numbers = [SWIZZLES[swizzle], 16 << swizzle, a_mn, b_mn, int(dtype == torch.float16), from_registers]
    program.launch([1], [128], [a_map, b_map, out, *numbers], shared_bytes=16384, seed=seed)
    return (out - a.float() @ b.float().mT).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("a_mn, b_mn", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_product_of_tiles_in_shared_memory(program_of, swizzle, a_mn, b_mn, dtype):
    for seed in range(3):
        assert error(program_of(text()), swizzle, a_mn, b_mn, dtype, seed=seed) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product_of_registers_and_a_tile(program_of, dtype):
    for seed in range(3):
        assert error(program_of(text()), 3, 0, 0, dtype, from_registers=1, seed=seed) < 1e-4


def test_product_that_nobody_waits_for_is_an_error(program_of):
    program = program_of(text(wait="", swizzles={3: 1}))
    for seed in range(3):
        with pytest.raises(EmulationError, match="exited with .* products that it did not wait for"):
            error(program, 3, 0, 0, torch.bfloat16, seed=seed)
