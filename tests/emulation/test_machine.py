"""The emulator itself: what a kernel must not do is reported, with the threads and the line."""

import pytest
import torch
from emulator import EmulationError, TensorMap

SEEDS = range(8)

EXCHANGE = """
extern "C" __global__ void run(int* __restrict__ out) {{
  __shared__ __align__(16) int tile[64];
  tile[threadIdx.x] = threadIdx.x + 1;
  {between}
  out[threadIdx.x] = tile[threadIdx.x ^ {distance}];
}}
"""


def exchanged(program, distance, seed):
    out = torch.zeros(64, dtype=torch.int32)
    program.launch([1], [64], [out], seed=seed)
    return torch.equal(out, (torch.arange(64, dtype=torch.int32) ^ distance) + 1)


@pytest.mark.parametrize("distance, between", [(32, "__syncthreads();"), (1, "__syncwarp();")])
def test_barrier_makes_exchange_right_under_every_seed(program_of, distance, between):
    program = program_of(EXCHANGE.format(distance=distance, between=between))
    assert all(exchanged(program, distance, seed) for seed in SEEDS)


def test_missing_barrier_gives_wrong_data_under_some_seed(program_of):
    program = program_of(EXCHANGE.format(distance=32, between=""), races=False)
    assert not all(exchanged(program, 32, seed) for seed in SEEDS)


@pytest.mark.parametrize("between", ["", "__shfl_sync(0xffffffffu, 0, 0);"])
def test_missing_barrier_is_a_race_whatever_the_seed(program_of, between):
    program = program_of(EXCHANGE.format(distance=1, between=between))
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=r"data race.*tile(.|\n)*line \d+: out\[threadIdx.x\] = tile"):
            exchanged(program, 1, seed)


def test_deadlock_says_who_waits_for_what_and_where(program_of):
    program = program_of("""
extern "C" __global__ void run() {
  __shared__ uint64_t full_mem[2];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  if (threadIdx.x == 0) full[1].init(33);
  __syncthreads();
  if (threadIdx.x < 32) {
    full[1].arrive();
    full[1].wait(0);
  } else if (threadIdx.x < 64) {
    tl::__sync_thread_partial(3, 64);
  }
}""")
    with pytest.raises(EmulationError) as caught:
        program.launch([1], [96], [])
    said = str(caught.value)
    assert "deadlock in block 0" in said
    assert "warp 0, all lanes: waits at parity 0 of the mbarrier at full_mem + 8 bytes: phase 0, 1 of 33" in said
    assert "warp 1, all lanes: waits at barrier 3, where 32 of 64 threads are" in said
    assert "warp 2, all lanes: exited" in said
    assert "full[1].wait(0);" in said


def test_lanes_that_part_before_a_collective_are_named(program_of):
    program = program_of("""
extern "C" __global__ void run(int* out) {
  if (threadIdx.x < 8) __syncwarp();
  else out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}""")
    with pytest.raises(EmulationError, match="lanes 0-7: waits at __syncwarp(.|\n)*lanes 8-31: waits at __shfl_sync"):
        program.launch([1], [32], [torch.zeros(32, dtype=torch.int32)])


OUTSIDE = """
extern "C" __global__ void run(int* out, int place) {
  if (threadIdx.x == 5) out[place] = 7;
}
"""


@pytest.mark.parametrize("place", [16, -1, 15000, -15000])
@pytest.mark.parametrize("races", [True, False])
def test_store_outside_a_tensor_is_reported(program_of, place, races):
    program = program_of(OUTSIDE, races=races)
    with pytest.raises(EmulationError, match=r"inside its tensors(.|\n)*`out`|in none of its tensors"):
        program.launch([1], [32], [torch.zeros(16, dtype=torch.int32), place], names=["out", "place"])


def test_store_outside_a_tensor_names_the_line_and_the_thread(program_of):
    program = program_of(OUTSIDE)
    with pytest.raises(EmulationError, match=r"byte 64 of the 64 of `out` \(block 0, thread 5\)\n.*out\[place\] = 7"):
        program.launch([1], [32], [torch.zeros(16, dtype=torch.int32), 16], names=["out", "place"])


def test_run_after_an_error_is_as_the_first(program_of):
    program = program_of(OUTSIDE)
    out = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(EmulationError):
        program.launch([1], [32], [out, 16])
    program.launch([1], [32], [out, 3])
    assert out.tolist() == [0, 0, 0, 7] + [0] * 12


@pytest.mark.parametrize(
    "statement, said",
    [
        ('asm volatile("lop3.b32 %0, %1, %1, %1, 0x80;" : "=r"(x) : "r"(x));', r"line 12 has `lop3.b32"),
        ('asm volatile("mov.b32 %0, %1; mov.b32 %0, %1;" : "=r"(x) : "r"(x));', "must be one instruction"),
        ("tl::tma_gather(&x);", "tma_gather"),
    ],
)
def test_what_is_not_modelled_is_an_error(program_of, statement, said):
    with pytest.raises(EmulationError, match=said):
        program_of('extern "C" __global__ void run() {\n  unsigned x = 1;\n\n' + statement + "\n}")


COPY = """
extern "C" __global__ void run(__grid_constant__ const CUtensorMap from, __grid_constant__ const CUtensorMap to,
                               int column, int row) {{
  extern __shared__ __align__(1024) uchar tile[];
  __shared__ uint64_t full_mem[1];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  if (threadIdx.x == 0) full[0].init(1);
  __syncthreads();
  if (threadIdx.x == 0) {{
    full[0].arrive_and_expect_tx(8 * 128);
    tl::tma_load(from, full[0], tile, column, row);
  }}
  {wait}
  float* place = reinterpret_cast<float*>(tile) + threadIdx.x;
  *place += 1.f;
  {fence}
  __syncthreads();
  if (threadIdx.x == 0) {{
    tl::tma_store(to, tile, column, row);
    tl::tma_store_arrive();
    {wait_store}
  }}
}}
"""
STEPS = {"wait": "full[0].wait(0);", "fence": "tl::fence_proxy_async();", "wait_store": "tl::tma_store_wait<0>();"}


def copied(program, column, row, seed):
    source = torch.arange(20 * 36, dtype=torch.float32).view(20, 36)
    target = torch.full_like(source, -1)
    maps = [TensorMap(x, (36, 20), (4, 144), (32, 8), swizzle=3) for x in (source, target)]
    program.launch([1], [256], [*maps, column, row], shared_bytes=1024, seed=seed)
    wanted = torch.full_like(source, -1)
    rows, columns = slice(max(row, 0), max(row + 8, 0)), slice(max(column, 0), max(column + 32, 0))
    wanted[rows, columns] = source[rows, columns] + 1
    return torch.equal(target, wanted)


@pytest.mark.parametrize("column, row", [(0, 0), (20, 3), (-8, -3), (3, 16), (40, 2)])
def test_tensor_copies_stop_at_the_edges_of_the_tensor(program_of, column, row):
    program = program_of(COPY.format(**STEPS))
    assert all(copied(program, column, row, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "step, said",
    [
        ("wait", "data race.*an asynchronous copy wrote it, then thread|thread .* wrote it, then an asynchronous copy"),
        ("fence", "without a proxy fence"),
        ("wait_store", "wait for its tensor stores"),
    ],
)
def test_missing_step_of_a_tensor_copy_is_reported(program_of, step, said):
    program = program_of(COPY.format(**{**STEPS, step: ""}))
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=said):
            copied(program, 0, 0, seed)


def test_tensor_map_that_the_driver_refuses_is_refused():
    with pytest.raises(EmulationError, match="box\\[0\\] within the swizzle"):
        TensorMap(torch.zeros(8, 64), (64, 8), (4, 256), (64, 8), swizzle=3)


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bfloat16_t"), (torch.float16, "half_t")])
def test_numbers_are_rounded_as_torch_rounds_them(program_of, dtype, name):
    program = program_of(f"""
extern "C" __global__ void run(const float* in, {name}* out, float* back) {{
  const int i = blockIdx.x * 256 + threadIdx.x;
  out[i] = static_cast<{name}>(in[i]);
  back[i] = static_cast<float>(out[i]);
}}""")
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.linspace(-7e-5, 7e-5, 1024), torch.randn(1024) * 1e4])
    numbers = torch.where(numbers.isnan(), torch.zeros(()), numbers)
    out, back = torch.zeros(numbers.shape, dtype=dtype), torch.zeros_like(numbers)
    program.launch([numbers.numel() // 256], [256], [numbers, out, back], flush_denormals=False)
    assert torch.equal(out, numbers.to(dtype))
    assert torch.equal(back, out.float())


def test_barrier_that_data_overwrites_is_an_error_even_when_a_load_lands_late(program_of):
    program = program_of("""
extern "C" __global__ void run(const float* in) {
  extern __shared__ __align__(1024) uchar tile[];
  __shared__ uint64_t full_mem[1];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  if (threadIdx.x == 0) {
    full[0].init(1);
    tl::tma_load(tile, in, full[0], 128);
    full_mem[0] = 0;
  }
}""")
    with pytest.raises(
        EmulationError, match="a tensor load: the mbarrier at full_mem.* overwritten as if it were data"
    ):
        program.launch([1], [32], [torch.zeros(32)], shared_bytes=1024)


BULK = """
#include <tl_templates/cuda/copy.h>
extern "C" __global__ void run(const float* in, float* out, int first, int bulk) {
  extern __shared__ __align__(1024) uchar tile[];
  __shared__ uint64_t full_mem[1];
  auto full = reinterpret_cast<Barrier*>(full_mem);
  if (threadIdx.x == 0) full[0].init(1);
  __syncthreads();
  if (bulk) {
    if (threadIdx.x == 0) {
      full[0].arrive_and_expect_tx(512);
      tl::tma_load(tile, in + first, full[0], 512);
    }
    full[0].wait(0);
    if (threadIdx.x == 0) {
      tl::tma_store(out, tile, 512);
      tl::tma_store_arrive();
      tl::tma_store_wait<0>();
    }
  } else {
    tl::cp_async_gs<16>(tile + threadIdx.x * 16, in + first + threadIdx.x * 4);
    tl::cp_async_commit();
    tl::cp_async_wait<0>();
    __syncwarp();
    out[threadIdx.x] = reinterpret_cast<float*>(tile)[threadIdx.x];
    for (int i = 1; i < 4; ++i) out[i * 32 + threadIdx.x] = reinterpret_cast<float*>(tile)[i * 32 + threadIdx.x];
  }
}
"""


@pytest.mark.parametrize("bulk", [0, 1])
def test_copies_without_a_tensor_map(program_of, bulk):
    program = program_of(BULK)
    source = torch.randn(140)
    for seed in SEEDS:
        out = torch.zeros(128)
        program.launch([1], [32], [source, out, 8, bulk], shared_bytes=1024, seed=seed)
        assert torch.equal(out, source[8:136])
    with pytest.raises(EmulationError, match="must lie in one tensor"):
        program.launch([1], [32], [source, out, 16, bulk], shared_bytes=1024)


def test_tensor_map_larger_than_its_tensor_is_refused():
    with pytest.raises(EmulationError, match="all of it in the tensor"):
        TensorMap(torch.zeros(8, 64), (64, 9), (4, 256), (32, 8), swizzle=3)
