"""Gate-free inverse of every chunk on Hopper, Ã = A' diag(β) = (I + tril(diag(β) K Kᵀ, −1))⁻¹ diag(β), MATH.md (5),
and the chunk-local cumulative gates (2), log₂ γ.

With the update gate folded into the columns, no later kernel of the forward needs β, and the same matrix serves the
state's transfer (`A' diag(β)` of (12)) and the backward (dV = (Ã∘Γ)ᵀ dU).  A CTA makes K Kᵀ once per key head; then
each warp inverts one value head by itself (`inverse_sm90`).  Rows and columns of absent tokens of a partial chunk are
exactly zero; their gates repeat the last present value, so a chunk's last gate is always its whole decay.  The upper
right quarter of Ã, zero by definition, is not written: device memory limits this kernel.  The last slot comes first:
what follows begins with the first chunks of the first sequences, whose K and Ã are then still in L2.

| step     | threads    | does                                                                        |
| -------- | ---------- | --------------------------------------------------------------------------- |
| load     | 1 and 128  | TMA K of (slot, key heads); meanwhile β and g of all heads                  |
| K Kᵀ     | 128        | one WGMMA chain m64n64 per key head; the K tile becomes fp16 products       |
| inverse  | 1 warp     | per value head: gates by warp scan; inverse in registers; × β per column;   |
|          |            | TMA store of 32 rows at a time                                              |
"""

from qla_jit.arch import get_arch
from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .inverse_sm90 import INVERSE_CUDA, PRODUCT_BYTES, STRIP_ROWS

NAME = "kkt_inverse_sm90"
WARPS = 4

PARAMETERS = (
    Parameter("value_heads_per_cta", (1, 2, 3, 4, 6, 8), 4, "consecutive value heads of a CTA, four at a time"),
    Parameter("min_ctas_per_sm", (1, 4, 5, 6), 6, "occupancy the compiler must leave room for"),
)


def key_heads(problem: Problem, schedule: Schedule) -> int:
    """Key heads whose value heads a CTA inverts: one, or several with all of theirs."""
    return max(1, schedule["value_heads_per_cta"] // problem.group_size)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    registers = min(255, 65536 // (32 * WARPS * schedule["min_ctas_per_sm"]) // 8 * 8)
    return (Role("inverse", WARPS, registers, "the whole chunk"),)


def tile_rows(problem: Problem) -> int:
    """Rows of a K tile, which later holds K Kᵀ: enough for either."""
    rows = -(-PRODUCT_BYTES // (2 * problem.head_dim_k))
    return max(problem.chunk_size, -(-rows // 8) * 8)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, heads = problem.chunk_size, schedule["value_heads_per_cta"]
    return (
        SharedBuffer("k or K Kᵀ", key_heads(problem, schedule) * tile_rows(problem) * problem.head_dim_k, 2),
        SharedBuffer("strips", min(WARPS, heads) * STRIP_ROWS * c, 2),
        SharedBuffer("beta and gates", 2 * heads * c, 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    return 1


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk = problem.chunk_size, problem.head_dim_k
    shared_by = min(problem.group_size, schedule["value_heads_per_cta"])
    merges = 4 * (2 * 2 * 8**3) + 2 * (2 * 2 * 16**3) + 2 * 2 * 32**3
    return Work(
        flops=2 * c * c * dk // shared_by + merges,
        bytes_read=2 * c * dk // shared_by + 2 * 4 * c,
        bytes_written=2 * c * c + 4 * c,
    )


def _heads_divide(problem: Problem, schedule: Schedule, arch) -> str | None:
    heads, group = schedule["value_heads_per_cta"], problem.group_size
    if group % heads and heads % group:
        return f"value_heads_per_cta={heads} neither divides nor is a multiple of the {group} value heads of a key head"
    if problem.num_value_heads % heads:
        return f"value_heads_per_cta={heads} does not divide num_value_heads={problem.num_value_heads}"
    return None


def _occupancy_fits(problem: Problem, schedule: Schedule, arch) -> str | None:
    need = schedule["min_ctas_per_sm"] * (sum(b.nbytes for b in buffers(problem, schedule)) + 1024)
    if need > arch.smem_bytes_per_sm:
        return f"{schedule['min_ctas_per_sm']} CTAs need {need} B of shared memory, an SM has {arch.smem_bytes_per_sm}"
    return None


RULES = (Rule("value_heads_are_whole_groups", _heads_divide), Rule("occupancy_fits_shared_memory", _occupancy_fits))


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """The most value heads per CTA, up to one per warp, of one key head if it has as many; then the most CTAs."""
    arch, fitting = get_arch(problem.arch), []
    for heads in PARAMETERS[0].choices:
        for ctas in PARAMETERS[1].choices:
            s = schedule.replace(value_heads_per_cta=heads, min_ctas_per_sm=ctas)
            if heads <= WARPS and not (_heads_divide(problem, s, arch) or _occupancy_fits(problem, s, arch)):
                fitting.append(s)
    return max(fitting, key=lambda s: (s["value_heads_per_cta"], s["min_ctas_per_sm"]))


def unsupported(problem: Problem) -> str | None:
    return None if problem.chunk_size == 64 else f"chunk_size={problem.chunk_size} (the inverse is written for 64 rows)"


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK = problem.chunk_size, problem.head_dim_k
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    HEADS, KEYS = schedule["value_heads_per_cta"], key_heads(problem, schedule)
    TILE, STRIPS = tile_rows(problem), min(WARPS, HEADS)
    dtype = problem.dtype
    blocks = HV // HEADS
    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")

    @T.macro
    def store_strip(strips, a, slot, first_head, row, columns):
        T.fence_proxy_async()
        T.sync_warp()
        tx = T.get_thread_binding()
        if tx < 32:
            T.copy(strips[0, :, 0:columns], a[slot, first_head, row : row + STRIP_ROWS, 0:columns])
        if STRIPS > 1:
            if tx >= 32 and tx < 64:
                T.copy(strips[1, :, 0:columns], a[slot, first_head + 1, row : row + STRIP_ROWS, 0:columns])
        if STRIPS > 2:
            if tx >= 64 and tx < 96:
                T.copy(strips[2, :, 0:columns], a[slot, first_head + 2, row : row + STRIP_ROWS, 0:columns])
        if STRIPS > 3:
            if tx >= 96:
                T.copy(strips[3, :, 0:columns], a[slot, first_head + 3, row : row + STRIP_ROWS, 0:columns])

    @T.prim_func
    def kkt_inverse(
        k: T.Tensor((num_tokens, H, DK), dtype),
        beta: T.Tensor((num_tokens, HV), "float32"),
        g: T.Tensor((num_tokens, HV), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
    ):
        with T.Kernel(num_slots * blocks, threads=32 * WARPS, prelude=INVERSE_CUDA) as block:
            T.annotate_min_blocks_per_sm(schedule["min_ctas_per_sm"])
            k_s = T.alloc_shared((KEYS, TILE, DK), dtype)
            strips = T.alloc_shared((STRIPS, STRIP_ROWS, C), dtype)
            beta_s = T.alloc_shared((HEADS * C,), "float32", scope="shared")
            gates_s = T.alloc_shared((HEADS * C,), "float32", scope="shared")
            kk = T.alloc_fragment((C, C), "float32")
            carried = T.alloc_local((24,), "uint32")  # between the two halves of an inverse
            loaded = T.alloc_barrier(arrive_count=[32 * WARPS])
            T.annotate_layout({strips: tilelang.layout.make_half_bank_swizzled_layout(strips)})
            T.pdl_trigger()
            warp = T.get_thread_binding() // 32
            slot = num_slots - 1 - block // blocks
            first_head = block % blocks * HEADS
            seq = T.alloc_var("int32")
            seq = T.call_extern("int32", "qla::sequence_of_slot", T.access_ptr(bounds[0], "r"), num_bounds - 1, slot, C)
            token0 = bounds[seq] + (slot - bounds[seq] // C - seq) * C
            valid = T.min(bounds[seq + 1] - token0, C)
            if valid > 0:
                for i in T.unroll(KEYS):
                    T.tma_copy(k[token0 : token0 + C, first_head // GROUP + i, :], k_s[i, 0:C, :], barrier=loaded[0])
                T.barrier_arrive(loaded[0])
                for i in T.Parallel(HEADS * C):  # heads of a token are neighbours in memory
                    token = T.min(token0 + i // HEADS, num_tokens - 1)
                    present = i // HEADS < valid
                    head = first_head + i % HEADS
                    beta_s[i % HEADS * C + i // HEADS] = T.if_then_else(present, beta[token, head], 0.0)
                    gates_s[i % HEADS * C + i // HEADS] = T.if_then_else(present, g[token, head], 0.0)
                T.barrier_wait(loaded[0], 0)
                for i in T.unroll(KEYS):
                    T.wgmma_gemm(
                        k_s[i, 0:C, :], k_s[i, 0:C, :], kk, transpose_B=True, clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )  # fmt: skip
                    T.wait_wgmma(0)
                    T.sync_threads()  # from here the K tile is scratch
                    T.call_extern("handle", "qla::store_products", kk.data, T.access_ptr(k_s[i, 0, 0], "w"), valid)
                T.sync_threads()
                for i in T.serial(T.ceildiv(HEADS, WARPS)):
                    h = i * WARPS + warp
                    if h < HEADS:
                        T.call_extern(
                            "handle", "qla::scan_gates", T.access_ptr(gates_s[h * C], "r"),
                            T.access_ptr(log_gates[slot, first_head + h, 0], "w"),
                        )  # fmt: skip
                        T.call_extern(
                            "handle", "qla::invert_upper", T.access_ptr(k_s[h // min(GROUP, HEADS), 0, 0], "r"),
                            T.access_ptr(beta_s[h * C], "r"), T.access_ptr(strips[warp, 0, 0], "w"), carried.data,
                        )  # fmt: skip
                        store_strip(strips, a, slot, first_head + i * WARPS, 0, C // 2)
                        T.call_extern(
                            "handle", "qla::invert_lower", T.access_ptr(k_s[h // min(GROUP, HEADS), 0, 0], "r"),
                            T.access_ptr(beta_s[h * C], "r"), T.access_ptr(strips[warp, 0, 0], "w"), carried.data,
                        )  # fmt: skip
                        store_strip(strips, a, slot, first_head + i * WARPS, STRIP_ROWS, C)

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
