"""Gate-free inverse of every chunk on Hopper: Ã = A' diag(β) = (I + tril(diag(β) K Kᵀ, −1))⁻¹ diag(β), MATH.md (5).

With the update gate folded into the columns, no later kernel of the forward needs β, and the same matrix serves the
state's transfer (`A' diag(β)` of (12)) and the backward (dV = (Ã∘Γ)ᵀ dU).  K Kᵀ is made once per key head and reused
for `value_heads_per_cta` value heads.  Rows and columns of absent tokens of a partial chunk are exactly zero.

| step        | threads | does                                                                               |
| ----------- | ------- | ---------------------------------------------------------------------------------- |
| load        | 1       | TMA K of (slot, key head); threads meet at one mbarrier                            |
| K Kᵀ        | 128     | one WGMMA chain m64n64, fp32 accumulators kept for all value heads                 |
|             |         | then, per pair of value heads:                                                     |
| base        | 4 warps | 16 × 16 diagonal blocks: forward substitution in fp32, one column per lane         |
| merge 16→32 | 4 warps | R = −A₂₂ L₂₁ A₁₁ by mma.sync in fp16 with fp32 accumulators, one merge per warp    |
| merge 32→64 | 4 warps | the same on 32 × 32 blocks, one 16 × 16 block of R per warp and head               |
| store       | 128     | × β per column, 16-byte stores                                                     |
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .inverse_sm90 import BASE_FLOATS, INVERSE_CUDA, INVERSE_PITCH

NAME = "kkt_inverse_sm90"

PARAMETERS = (
    Parameter("value_heads_per_cta", (1, 2, 4, 8), 4, "value heads of one key head that share K Kt in a CTA"),
    Parameter("min_ctas_per_sm", (1, 4, 6, 8), 6, "occupancy the compiler must leave room for"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    registers = min(255, 65536 // (128 * schedule["min_ctas_per_sm"]) // 8 * 8)
    return (Role("inverse", 4, registers, "the whole chunk"),)


def tile_rows(problem: Problem) -> int:
    """Rows of the K tile, which later holds the fp32 diagonal blocks: enough for either."""
    rows = -(-BASE_FLOATS * 4 // (2 * problem.head_dim_k))
    return max(problem.chunk_size, -(-rows // 8) * 8)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, together = problem.chunk_size, min(2, schedule["value_heads_per_cta"])
    return (
        SharedBuffer("k or base", tile_rows(problem) * problem.head_dim_k, 2),
        SharedBuffer("work", together * c * INVERSE_PITCH, 2),
        SharedBuffer("beta", schedule["value_heads_per_cta"] * c, 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    return 1


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, shared_by = problem.chunk_size, problem.head_dim_k, schedule["value_heads_per_cta"]
    merges = 2 * (2 * 2 * 16**3) + 2 * 2 * 32**3
    return Work(
        flops=2 * c * c * dk // shared_by + merges, bytes_read=2 * c * dk // shared_by + 4 * c, bytes_written=2 * c * c
    )


def _heads_divide(problem: Problem, schedule: Schedule, arch) -> str | None:
    heads = schedule["value_heads_per_cta"]
    if problem.group_size % heads:
        return f"value_heads_per_cta={heads} does not divide the {problem.group_size} value heads of a key head"
    return None


def _occupancy_fits(problem: Problem, schedule: Schedule, arch) -> str | None:
    need = schedule["min_ctas_per_sm"] * (sum(b.nbytes for b in buffers(problem, schedule)) + 1024)
    if need > arch.smem_bytes_per_sm:
        return f"{schedule['min_ctas_per_sm']} CTAs need {need} B of shared memory, an SM has {arch.smem_bytes_per_sm}"
    return None


RULES = (Rule("value_heads_divide_the_group", _heads_divide), Rule("occupancy_fits_shared_memory", _occupancy_fits))


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """The most value heads per CTA that divide the group."""
    fitting = [h for h in PARAMETERS[0].choices if problem.group_size % h == 0 and h <= 4]
    return schedule.replace(value_heads_per_cta=max(fitting))


def unsupported(problem: Problem) -> str | None:
    return None if problem.chunk_size == 64 else f"chunk_size={problem.chunk_size} (the inverse is written for 64 rows)"


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK = problem.chunk_size, problem.head_dim_k
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    HEADS = schedule["value_heads_per_cta"]
    PAIR = min(2, HEADS)
    TILE = tile_rows(problem)
    dtype = problem.dtype
    blocks = HV // HEADS
    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")

    @T.prim_func
    def kkt_inverse(
        k: T.Tensor((num_tokens, H, DK), dtype),
        beta: T.Tensor((num_tokens, HV), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        a: T.Tensor((num_slots, HV, C, C), dtype),
    ):
        with T.Kernel(num_slots * blocks, threads=128, prelude=INVERSE_CUDA) as block:
            T.annotate_min_blocks_per_sm(schedule["min_ctas_per_sm"])
            k_s = T.alloc_shared((TILE, DK), dtype)
            work_s = T.alloc_shared((PAIR * C, INVERSE_PITCH), "float16")
            beta_s = T.alloc_shared((HEADS * C,), "float32", scope="shared")
            kk = T.alloc_fragment((C, C), "float32")
            loaded = T.alloc_barrier(arrive_count=[128])
            T.annotate_layout({work_s: tilelang.layout.make_linear_layout(work_s)})
            slot = block // blocks
            first_head = block % blocks * HEADS
            seq = T.alloc_var("int32")
            seq = T.call_extern("int32", "qla::sequence_of_slot", T.access_ptr(bounds[0], "r"), num_bounds - 1, slot, C)
            token0 = bounds[seq] + (slot - bounds[seq] // C - seq) * C
            valid = T.min(bounds[seq + 1] - token0, C)
            if valid > 0:
                T.tma_copy(k[token0 : token0 + C, first_head // GROUP, :], k_s[0:C, :], barrier=loaded[0])
                T.barrier_arrive(loaded[0])
                for i in T.Parallel(HEADS * C):  # heads of a token are neighbours in memory
                    token = T.min(token0 + i // HEADS, num_tokens - 1)
                    beta_s[i % HEADS * C + i // HEADS] = T.if_then_else(
                        i // HEADS < valid, beta[token, first_head + i % HEADS], 0.0
                    )
                T.barrier_wait(loaded[0], 0)
                T.wgmma_gemm(
                    k_s[0:C, :], k_s[0:C, :], kk, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
                )
                T.wait_wgmma(0)
                T.sync_threads()  # from here the K tile is scratch
                for h in T.serial(HEADS // PAIR):
                    T.call_extern(
                        "handle", f"qla::inverse_of_heads<{PAIR}>", kk.data, T.access_ptr(work_s[0, 0], "rw"),
                        T.access_ptr(k_s[0, 0], "rw"), T.access_ptr(beta_s[h * PAIR * C], "r"),
                        T.access_ptr(a[slot, first_head + h * PAIR, 0, 0], "w"), valid,
                    )  # fmt: skip

    return kkt_inverse


TEMPLATE = Template(
    kernel="kkt_inverse",
    name=NAME,
    archs=("sm90",),
    preferred=("sm90",),
    parameters=PARAMETERS,
    rules=RULES,
    roles=roles,
    buffers=buffers,
    barriers=barriers,
    work=work,
    prim_func=prim_func,
    sources=("kkt_inverse_sm90.py", "inverse_sm90.py"),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
