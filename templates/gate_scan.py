"""Chunk-local cumulative gates, MATH.md (2), for every arch: log₂ γ of each (chunk, value head), laid out per chunk.

`log_gates[slot, head, t] = log₂(e) · Σ_{s ≤ t} g[s]`, so later kernels use exp2 without a multiplication.  Positions
of absent tokens of a partial chunk repeat the last present value: the chunk's last entry is always its whole decay.
One thread scans one head out of shared memory; loads run over heads and stores over tokens, both coalesced.
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

NAME = "gate_scan"
LOG2_E = 1.4426950408889634

PARAMETERS = (
    Parameter("heads_per_cta", (4, 8, 16, 32), 8, "value heads whose gates one CTA scans"),
    Parameter("threads", (64, 128, 256), 128, "threads per CTA"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("scan", schedule["threads"] // 32, 64, "loads, scans and stores a tile of gates"),)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    return (SharedBuffer("gates", (problem.chunk_size + 1) * schedule["heads_per_cta"], 4),)


def work(problem: Problem, schedule: Schedule) -> Work:
    c = problem.chunk_size
    return Work(flops=0, bytes_read=4 * c, bytes_written=4 * c)


RULES = (
    Rule(
        "heads_divide",
        lambda p, s, a: None
        if p.num_value_heads % s["heads_per_cta"] == 0 or s["heads_per_cta"] == 4
        else f"heads_per_cta={s['heads_per_cta']} does not divide num_value_heads={p.num_value_heads}",
    ),
)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """Eight heads where they divide the value heads, else four with a masked last block."""
    return schedule if problem.num_value_heads % schedule["heads_per_cta"] == 0 else schedule.replace(heads_per_cta=4)


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang.language as T  # no postponed annotations in this module: T.prim_func evaluates them

    C, HV = problem.chunk_size, problem.num_value_heads
    HEADS, threads = schedule["heads_per_cta"], schedule["threads"]
    blocks = -(-HV // HEADS)
    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")

    @T.prim_func
    def gate_scan(
        g: T.Tensor((num_tokens, HV), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
    ):
        with T.Kernel(num_slots * blocks, threads=threads) as block:
            tile = T.alloc_shared((HEADS, C + 1), "float32")
            slot = block // blocks
            head0 = block % blocks * HEADS
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
            valid = T.min(bounds[seq + 1] - token0, C)
            if valid > 0:
                for t, h in T.Parallel(C, HEADS):
                    tile[h, t] = T.if_then_else(t < valid and head0 + h < HV, g[token0 + t, head0 + h] * LOG2_E, 0.0)
                for h in T.Parallel(HEADS):
                    for t in T.serial(1, C):
                        tile[h, t] += tile[h, t - 1]
                for h, t in T.Parallel(HEADS, C):
                    if head0 + h < HV:
                        log_gates[slot, head0 + h, t] = tile[h, t]

    return gate_scan


ALL_ARCHS = ("sm90", "sm100", "sm103", "sm120", "sm121")

TEMPLATE = Template(
    kernel="gate_scan",
    name=NAME,
    archs=ALL_ARCHS,
    preferred=ALL_ARCHS,
    parameters=PARAMETERS,
    rules=RULES,
    roles=roles,
    buffers=buffers,
    work=work,
    prim_func=prim_func,
    sources=("gate_scan.py",),
    adapt=adapt,
)
