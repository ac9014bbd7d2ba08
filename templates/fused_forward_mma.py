"""Fused forward of one (sequence, value head), portable: mma.sync products, cp.async copies, one program for all warps.

MATH.md (6)-(9) with Ã = A' diag(β) from `kkt_inverse`, everything transposed so that the state Sᵀ [d_v, d_k] stays in
registers and each accumulator, rounded, is the register operand of the next product:

    Y = V − diag(γ) K S     U = (Ã∘Γ) Y     O = scale diag(γ) Q S + (scale tril(Q Kᵀ)∘Γ) U     S ← γ_C S + (γ_C/γ K)ᵀ U

Runs on every arch, and on the CPU in tests.  Absent tokens of a partial chunk read the last present one (finite data
of the same sequence); Ã is zero in their rows and columns, so they add nothing.
"""

from qla_jit.arch import ALL_ARCHS
from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

NAME = "fused_forward_mma"

PARAMETERS = (
    Parameter("dv_split", (1, 2, 4), 2, "CTAs that share one value head, each with head_dim_v / dv_split columns"),
    Parameter("copies", ("plain", "async"), "plain", "how chunks reach shared memory: load and store, or cp.async"),
    Parameter("threads", (128, 256), 128, "threads per CTA; each warp owns rows of d_v"),
)


def dv_tile(problem: Problem, schedule: Schedule) -> int:
    """Columns of d_v that one CTA owns."""
    return problem.head_dim_v // schedule["dv_split"]


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("all", schedule["threads"] // 32, min(255, 65536 // schedule["threads"]), "every step of the chunk"),)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, dv_tile(problem, schedule)
    return (
        SharedBuffer("k", c * dk, 2),
        SharedBuffer("q", c * dk, 2),
        SharedBuffer("v", c * dv, 2),
        SharedBuffer("a", c * c, 2),
        SharedBuffer("gates", c, 4),
        SharedBuffer("t", c * c, 2),
        SharedBuffer("p", c * c, 2),
        SharedBuffer("o", c * dv, 2),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, dv, split = problem.chunk_size, problem.head_dim_k, problem.head_dim_v, schedule["dv_split"]
    flops = 3 * 2 * c * dk * dv + 2 * 2 * c * c * dv + split * 2 * c * c * dk
    read = 2 * c * dv + split * (2 * 2 * c * dk // problem.group_size + 2 * c * c + 4 * c)
    return Work(flops=flops, bytes_read=read, bytes_written=2 * c * dv)


def _warps_have_rows(problem: Problem, schedule: Schedule, arch) -> str | None:
    rows, warps = dv_tile(problem, schedule), schedule["threads"] // 32
    return None if rows >= 16 * warps else f"{warps} warps need {16 * warps} rows of d_v, the tile has {rows}"


RULES = (Rule("each_warp_owns_16_rows", _warps_have_rows),)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """64 columns of d_v per CTA: the state of 128 would not leave registers for the products."""
    return schedule.replace(dv_split=problem.head_dim_v // 64)


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang.language as T  # no postponed annotations in this module: T.prim_func evaluates them

    C, DK, DV = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    DVT, SPLIT = dv_tile(problem, schedule), schedule["dv_split"]
    dtype, state_dtype, v_first = problem.dtype, problem.state_dtype, problem.state_v_first
    state_shape = (DV, DK) if v_first else (DK, DV)
    rows = T.GemmWarpPolicy.FullRow
    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")
    num_initial = T.dynamic("num_initial")
    num_final = T.dynamic("num_final")
    num_sequences = T.dynamic("num_sequences")
    num_checkpoints = T.dynamic("num_checkpoints")

    @T.macro
    def save_state(state, states, row, head, dv0):
        for r, c in T.Parallel(DVT, DK):
            if v_first:
                states[row, head, dv0 + r, c] = T.cast(state[r, c], state_dtype)
            else:
                states[row, head, c, dv0 + r] = T.cast(state[r, c], state_dtype)

    @T.prim_func
    def fused_forward(
        q: T.Tensor((num_tokens, H, DK), dtype),
        k: T.Tensor((num_tokens, H, DK), dtype),
        v: T.Tensor((num_tokens, HV, DV), dtype),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        state_rows: T.Tensor((num_sequences,), "int32"),
        checkpoint_rows: T.Tensor((num_sequences,), "int32"),
        initial: T.Tensor((num_initial, HV, *state_shape), state_dtype),
        final: T.Tensor((num_final, HV, *state_shape), state_dtype),
        checkpoints: T.Tensor((num_checkpoints, HV, *state_shape), state_dtype),
        o: T.Tensor((num_tokens, HV, DV), dtype),
        scale: T.float32,
        has_initial: T.int32,
        has_final: T.int32,
        chunks_per_checkpoint: T.int32,
    ):
        with T.Kernel((num_bounds - 1) * HV * SPLIT, threads=schedule["threads"]) as block:
            k_s = T.alloc_shared((C, DK), dtype)
            q_s = T.alloc_shared((C, DK), dtype)
            v_s = T.alloc_shared((C, DVT), dtype)
            a_s = T.alloc_shared((C, C), dtype)
            gate_s = T.alloc_shared((C,), "float32")
            t_s = T.alloc_shared((C, C), dtype)
            p_s = T.alloc_shared((C, C), dtype)
            o_s = T.alloc_shared((C, DVT), dtype)
            state = T.alloc_fragment((DVT, DK), "float32")
            state_op = T.alloc_fragment((DVT, DK), dtype)
            y = T.alloc_fragment((DVT, C), "float32")
            y_op = T.alloc_fragment((DVT, C), dtype)
            out = T.alloc_fragment((DVT, C), "float32")
            square = T.alloc_fragment((C, C), "float32")

            seq = block // (HV * SPLIT)
            head = block % (HV * SPLIT) // SPLIT
            dv0 = block % SPLIT * DVT
            token0 = bounds[seq]
            length = bounds[seq + 1] - token0
            last = token0 + length - 1
            slot0 = token0 // C + seq

            row = state_rows[seq]
            if has_initial != 0 and row >= 0:
                for r, c in T.Parallel(DVT, DK):
                    if v_first:
                        state[r, c] = T.cast(initial[row, head, dv0 + r, c], "float32")
                    else:
                        state[r, c] = T.cast(initial[row, head, c, dv0 + r], "float32")
            else:
                T.clear(state)
            for i in T.Pipelined(T.ceildiv(length, C), num_stages=int(schedule["copies"] == "async")):
                for r, c in T.Parallel(C, DK):
                    k_s[r, c] = k[T.min(token0 + i * C + r, last), head // GROUP, c]
                for r, c in T.Parallel(C, DK):
                    q_s[r, c] = q[T.min(token0 + i * C + r, last), head // GROUP, c]
                for r, c in T.Parallel(C, DVT):
                    v_s[r, c] = v[T.min(token0 + i * C + r, last), head, dv0 + c]
                T.copy(a[slot0 + i, head, :, :], a_s)
                T.copy(log_gates[slot0 + i, head, :], gate_s)

                # (Ã∘Γ) and scale tril(Q Kᵀ)∘Γ
                T.copy(a_s, square)
                for r, c in T.Parallel(C, C):  # a quarter above the diagonal may hold anything
                    square[r, c] = T.if_then_else(r >= c, square[r, c] * T.exp2(gate_s[r] - gate_s[c]), 0.0)
                T.copy(square, t_s)
                T.gemm(q_s, k_s, square, transpose_B=True, clear_accum=True)
                for r, c in T.Parallel(C, C):
                    square[r, c] *= T.if_then_else(r >= c, T.exp2(gate_s[r] - gate_s[c]) * scale, 0.0)
                T.copy(square, p_s)

                # Yᵀ = Vᵀ − (K S)ᵀ γ, then Uᵀ = Yᵀ (Ã∘Γ)ᵀ
                T.copy(state, state_op)
                T.gemm(state_op, k_s, y, transpose_B=True, clear_accum=True, policy=rows)
                for r, c in T.Parallel(DVT, C):
                    y[r, c] = T.cast(v_s[c, r], "float32") - T.exp2(gate_s[c]) * y[r, c]
                T.copy(y, y_op)
                T.gemm(y_op, t_s, y, transpose_B=True, clear_accum=True, policy=rows)

                # Oᵀ = scale (Q S)ᵀ γ + Uᵀ Pᵀ
                T.gemm(state_op, q_s, out, transpose_B=True, clear_accum=True, policy=rows)
                for r, c in T.Parallel(DVT, C):
                    out[r, c] *= T.exp2(gate_s[c]) * scale
                T.copy(y, y_op)
                T.gemm(y_op, p_s, out, transpose_B=True, policy=rows)

                # Sᵀ ← γ_C Sᵀ + (Uᵀ γ_C/γ) K
                for r, c in T.Parallel(DVT, C):
                    y_op[r, c] = T.cast(y[r, c] * T.exp2(gate_s[C - 1] - gate_s[c]), dtype)
                for r, c in T.Parallel(DVT, DK):
                    state[r, c] *= T.exp2(gate_s[C - 1])
                T.gemm(y_op, k_s, state, policy=rows)

                for r, c in T.Parallel(DVT, C):
                    o_s[c, r] = T.cast(out[r, c], dtype)
                for r, c in T.Parallel(C, DVT):
                    if token0 + i * C + r <= last:
                        o[token0 + i * C + r, head, dv0 + c] = o_s[r, c]
                whole = length >= i * C + C
                if chunks_per_checkpoint > 0 and whole and T.truncmod(i + 1, T.max(chunks_per_checkpoint, 1)) == 0:
                    passed = T.truncdiv(i + 1, T.max(chunks_per_checkpoint, 1))
                    save_state(state, checkpoints, checkpoint_rows[seq] + passed - 1, head, dv0)
            if has_final != 0 and row >= 0:
                save_state(state, final, row, head, dv0)

    return fused_forward


TEMPLATE = Template(
    kernel="fused_forward",
    name=NAME,
    archs=ALL_ARCHS,
    preferred=("sm100", "sm103", "sm120", "sm121"),
    parameters=PARAMETERS,
    rules=RULES,
    roles=roles,
    buffers=buffers,
    work=work,
    prim_func=prim_func,
    sources=("fused_forward_mma.py",),
    adapt=adapt,
    pass_configs={"TL_DISABLE_WGMMA": True, "TL_DISABLE_TMA_LOWER": True, "TL_DISABLE_WARP_SPECIALIZED": True},
)
