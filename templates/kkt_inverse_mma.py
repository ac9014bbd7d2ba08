"""Gate-free inverse of every chunk, portable: Ã = (I + tril(diag(β) K Kᵀ, −1))⁻¹ diag(β), MATH.md (5), and the
chunk-local cumulative gates (2), log₂ γ.

Plain TileLang (mma.sync products, ordinary copies), so it runs on every arch and, for tests, on the CPU.  One CTA per
(slot, value head); the inverse is a forward substitution in fp32, one column of the result per thread, so only the
order of rows is serial.  Rows and columns of absent tokens are exactly zero, their gates repeat the last present value.
"""

from qla_jit.arch import ALL_ARCHS
from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Schedule
from qla_jit.template import SharedBuffer, Template, Work

NAME = "kkt_inverse_mma"
LOG2_E = 1.4426950408889634

PARAMETERS = (Parameter("threads", (64, 128), 128, "threads per CTA; the substitution uses chunk_size of them"),)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("inverse", schedule["threads"] // 32, 144, "the whole chunk"),)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c = problem.chunk_size
    return (
        SharedBuffer("k", c * problem.head_dim_k, 2),
        SharedBuffer("lower", c * c, 4),
        SharedBuffer("inverse", c * c, 4),
        SharedBuffer("beta", c, 4),
        SharedBuffer("gates", c, 4),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk = problem.chunk_size, problem.head_dim_k
    return Work(flops=2 * c * c * dk, bytes_read=2 * c * dk + 8 * c, bytes_written=2 * c * c + 4 * c)


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang.language as T  # no postponed annotations in this module: T.prim_func evaluates them

    C, DK = problem.chunk_size, problem.head_dim_k
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    dtype = problem.dtype
    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")

    @T.prim_func
    def kkt_inverse(
        k: T.Tensor((num_tokens, H, DK), dtype),
        beta: T.Tensor((num_tokens, HV), "float32"),
        g: T.Tensor((num_tokens, HV), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
    ):
        with T.Kernel(num_slots * HV, threads=schedule["threads"]) as block:
            k_s = T.alloc_shared((C, DK), dtype)
            lower_s = T.alloc_shared((C, C), "float32")
            inverse_s = T.alloc_shared((C, C), "float32")
            beta_s = T.alloc_shared((C,), "float32")
            gates_s = T.alloc_shared((C,), "float32")
            kk = T.alloc_fragment((C, C), "float32")
            slot = block // HV
            head = block % HV
            seq = T.alloc_var("int32")
            high = T.alloc_var("int32")
            seq = 0
            high = num_bounds - 2
            while seq < high:  # the last sequence with bounds[seq] // C + seq <= slot
                middle = (seq + high + 1) // 2
                if bounds[middle] // C + middle <= slot:
                    seq = middle
                else:
                    high = middle - 1
            token0 = bounds[seq] + (slot - bounds[seq] // C - seq) * C
            last = bounds[seq + 1] - 1
            if token0 <= last:
                for r, c in T.Parallel(C, DK):  # absent rows repeat the last present one: always finite, never used
                    k_s[r, c] = k[T.min(token0 + r, last), head // GROUP, c]
                for r in T.Parallel(C):
                    beta_s[r] = T.if_then_else(token0 + r <= last, beta[T.min(token0 + r, last), head], 0.0)
                    gates_s[r] = T.if_then_else(token0 + r <= last, g[T.min(token0 + r, last), head] * LOG2_E, 0.0)
                for _first in T.Parallel(1):
                    for r in T.serial(1, C):
                        gates_s[r] += gates_s[r - 1]
                for r in T.Parallel(C):
                    log_gates[slot, head, r] = gates_s[r]
                T.gemm(k_s, k_s, kk, transpose_B=True, clear_accum=True)
                for r, c in T.Parallel(C, C):
                    kk[r, c] = T.if_then_else(r > c, kk[r, c] * beta_s[r], 0.0)
                T.copy(kk, lower_s)
                for r, c in T.Parallel(C, C):
                    inverse_s[r, c] = T.if_then_else(r == c, 1.0, 0.0)
                for r in T.serial(1, C):
                    for c in T.Parallel(C):
                        total = T.alloc_var("float32")
                        total = 0.0
                        for j in T.serial(r):
                            total += lower_s[r, j] * inverse_s[j, c]
                        inverse_s[r, c] -= total
                for r, c in T.Parallel(C, C):
                    a[slot, head, r, c] = T.cast(inverse_s[r, c] * beta_s[c], dtype)

    return kkt_inverse


TEMPLATE = Template(
    kernel="kkt_inverse",
    name=NAME,
    archs=ALL_ARCHS,
    preferred=("sm100", "sm103", "sm120", "sm121"),
    parameters=PARAMETERS,
    rules=(),
    roles=roles,
    buffers=buffers,
    work=work,
    prim_func=prim_func,
    sources=("kkt_inverse_mma.py",),
    pass_configs={"TL_DISABLE_WGMMA": True, "TL_DISABLE_TMA_LOWER": True, "TL_DISABLE_WARP_SPECIALIZED": True},
)
