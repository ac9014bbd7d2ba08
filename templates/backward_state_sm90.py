"""Gradients of states and of V, from the last chunk to the first, on Hopper; warp-specialised.

The adjoint of the two-step forward (`fused_forward_sm90`), with the same X and B and two dependent products a chunk:

    Z = X dS + scale (B∘Γ)ᵀ dO        dS ← γ_C dS + scale (diag(γ) Q)ᵀ dO − (diag(γ) K)ᵀ Z

Z is the gradient of V.  Leaves it (`dv`), and, of each chunk, dSᵀ of the state that leaves it (`dstates`), both in the
dtype of V.  dSᵀ [d_v, d_k] stays in fp32 accumulators, 64 rows of d_v per state group, as S does in the forward.

| role      | warps  | per chunk, last one first                     | waits for              | signals                |
| --------- | ------ | --------------------------------------------- | ---------------------- | ---------------------- |
| load      | 1      | TMA K, Q; Ã without its zero quarter; dO      | kq/a/g_free            | kq/a/g_full            |
| gates     | 1      | log γ → γ, scale·γ, γ_C/γ, scale·Γ in factors | kq_free                | kq_full                |
| store × n | 1 each | dSᵀ, Z tiles to memory (TMA; rows at a tail)  | s/z_full               | s/z_free               |
| operands  | 4      | Q Kᵀ → P; P Ã ∘Γ → B; Ãᵀ K γ_C/γ → X          | kq/a_full, xb_free     | xb_full, kq/a_free     |
| state × n | 4 each | dSᵀ tile; X dS + Bᵀ dO → Z; Qᵀ dO, Kᵀ Z → dS; | kq/g/xb_full, s/z_free | kq/g/xb_free, s/z_full |
|           |        | Z tile; dS rounded for the next chunk         |                        |                        |

Stages: K, Q and gates `stages_kq`; Ã, dO two each; X and B `stages_xb`; the tiles that leave one per state group (n of
them).  Products, barriers and ptxas' rules as in `fused_forward`.  May start before the kernel ahead of it has ended
(programmatic dependent launch).
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .backward_sm90 import STORES_CUDA, WHOLE_GROUPS, dv_tile, state_groups
from .fragments_sm90 import DECAY_FLOATS, FRAGMENTS_CUDA
from .operands_sm90 import two_step_operands_role
from .segments_sm90 import COUNT, FIRST, OF_SEGMENT, SEGMENT_FIELDS, SEGMENTS_CUDA, SEQUENCE, TURN, TURN_FIELDS
from .warp_groups_sm90 import launch_registers, register_rules

NAME = "backward_state_sm90"
STAGES_A = 2
STAGES_G = 2  # of dO

#: load/operands/state registers per thread, as in fused_forward.
REGISTERS = ("24/104/192", "32/96/192", "40/168/240", "40/216/240")

PARAMETERS = (
    Parameter("dv_split", (1, 2, 4), 1, "CTAs that share one value head, each with head_dim_v / dv_split columns"),
    Parameter("stages_kq", (2, 3), 2, "K, Q and gate stages; three let `operands` run a chunk ahead"),
    Parameter("stages_xb", (1, 2), 2, "X and B stages between `operands` and `state`"),
    Parameter("registers", REGISTERS, "24/104/192", "registers per thread of load, operands and each state group"),
)


def stores_tiles(problem: Problem) -> bool:
    """Whether dSᵀ and Z of every chunk are stored; `segment_gradient` wants the last dSᵀ alone."""
    return problem.kernel != "segment_gradient"


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    """Warp groups in thread order; `prim_func` branches on this table."""
    load, operands, state = (int(n) for n in schedule["registers"].split("/"))
    groups = state_groups(problem, schedule)
    return (
        *(Role(f"state{w}", 4, state, f"rows {64 * w}..{64 * w + 63} of dSᵀ: Z, dS") for w in range(groups)),
        Role("operands", 4, operands, "Q Kᵀ, B and X, ahead of the state"),
        Role("load", 4, load, "warp 0: TMA loads; warp 1: gates; warps 2 and 3: tiles of the state groups"),
    )


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, dv_tile(problem, schedule)
    kq, xb = schedule["stages_kq"], schedule["stages_xb"]
    return (
        SharedBuffer("k", kq * c * dk, 2),
        SharedBuffer("q", kq * c * dk, 2),
        SharedBuffer("a", STAGES_A * c * c, 2),
        SharedBuffer("g", STAGES_G * c * dv, 2),
        SharedBuffer("x", xb * c * dk, 2),
        SharedBuffer("b", xb * c * c, 2),
        SharedBuffer("gates", kq * (4 * c + DECAY_FLOATS), 4),
        *((SharedBuffer("s", dv * dk, 2), SharedBuffer("z", c * dv, 2)) if stores_tiles(problem) else ()),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of each ring."""
    rings = schedule["stages_kq"] + STAGES_A + STAGES_G + schedule["stages_xb"]
    return 2 * (rings + (2 * state_groups(problem, schedule) if stores_tiles(problem) else 0))


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, dv, split = problem.chunk_size, problem.head_dim_k, problem.head_dim_v, schedule["dv_split"]
    state = 2 * c * dk * dv * 3 + 2 * c * c * dv  # X dS, Qt dO, Kt Z, Bt dO
    operands = split * (2 * c * c * dk * 2 + 2 * c**3)  # Q Kt, X, B
    inverse = 2 * c * c * 3 // 4  # without its zero quarter
    read = 2 * c * dv + split * (2 * 2 * c * dk // problem.group_size + inverse + 4 * c)
    written = 2 * dk * dv + 2 * c * dv if stores_tiles(problem) else 0
    return Work(flops=state + operands, bytes_read=read, bytes_written=written)


RULES = (
    WHOLE_GROUPS,
    *register_rules(roles),
)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """At most two state groups; where one is enough, it and `operands` take the registers that are over."""
    schedule = schedule.replace(dv_split=max(1, problem.head_dim_v // 128))
    if problem.kernel == "segment_backward":  # its loads keep more addresses
        schedule = schedule.replace(registers="32/96/192")
    return schedule.replace(registers="40/168/240") if state_groups(problem, schedule) == 1 else schedule


def unsupported(problem: Problem) -> str | None:
    return None if problem.chunk_size == 64 else f"chunk_size={problem.chunk_size} (WGMMA tiles have 64 rows)"


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK, DV = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    DVT, GROUPS, SPLIT = dv_tile(problem, schedule), state_groups(problem, schedule), schedule["dv_split"]
    KQ, XB, NA, NG = schedule["stages_kq"], schedule["stages_xb"], STAGES_A, STAGES_G
    dtype, state_dtype = problem.dtype, problem.state_dtype
    v_first = problem.state_v_first
    state_shape = (DV, DK) if v_first else (DK, DV)
    state_strides = f"{DK}, {DK}, 1" if v_first else f"{DK}, 1, {DV}"  # as in fused_forward
    segmented, stores = problem.kernel != "backward_state", stores_tiles(problem)
    pitch = HV * DV  # of a token in dv
    table = roles(problem, schedule)
    registers = {role.name: role.registers for role in table}
    end_of = {role.name: sum(r.threads for r in table[: i + 1]) for i, role in enumerate(table)}  # past its last thread
    consumers, threads, first_load = 128 * GROUPS, end_of["load"], end_of["operands"]
    rows = T.GemmWarpPolicy.FullRow
    run_operands = two_step_operands_role(C, DK, KQ, NA, XB, dtype, backwards=True)

    def state_corner(row):
        """Where column 0 of a row of dSᵀ is in a state's last two dims."""
        return (row, 0) if v_first else (0, row)

    def segment_of(turn, segments, turns):
        """The segment of a CTA: all take turns, or those of cut sequences."""
        return segments[turn, TURN] if stores else turns[turn, OF_SEGMENT]

    def is_kept(i, warmup):
        """Whether the i-th chunk is the segment's own; those of its warm-up are of the one behind it."""
        return i >= warmup if segmented else True

    def is_whole(i, chunk, length, warmup):
        whole = length - chunk * C >= C
        return T.And(whole, i >= warmup) if segmented else whole

    def rows_kept(i, chunk, length, warmup):
        left = length - chunk * C
        return T.if_then_else(i >= warmup, left, 0) if segmented else left

    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")
    num_dfinal = T.dynamic("num_dfinal")
    num_dinitial = T.dynamic("num_dinitial")
    num_segments = T.dynamic("num_segments")
    num_turns = T.dynamic("num_turns")

    @T.macro
    def run_state(w, chunks, length, seq, head, dv0, has_dfinal, has_dinitial, dfinal, dinitial,
                  from_rows, from_token, to_rows, to_token, dv, k_s, q_s, g_s, x_s, b_s, s_s, z_s, gamma, gamma_q,
                  kq_full, kq_free, g_full, g_free, xb_full, xb_free, s_full, s_free, z_full, z_free):  # fmt: skip
        dstate = T.alloc_fragment((64, DK), "float32")
        dstate_op = T.alloc_fragment((64, DK), dtype)
        z = T.alloc_fragment((64, C), "float32")
        z_words = T.alloc_local((16,), "uint32")  # Z as packed pairs
        kz_op = T.alloc_fragment((64, C), dtype)  # −γ Z
        do_op = T.alloc_fragment((64, C), dtype)
        qdo_op = T.alloc_fragment((64, C), dtype)  # scale γ dO
        warp_row = w * 64 + ((T.get_thread_binding() // 32) % 4) * 16
        if has_dfinal != 0:
            T.call_extern(
                "handle", f"qla::load_state<{state_strides}>", dstate.data,
                T.access_ptr(dfinal[seq, head, *state_corner(dv0 + w * 64)], "r"),
            )  # fmt: skip
        else:
            T.clear(dstate)
        if segmented:
            if from_rows:
                T.call_extern(
                    "handle", f"qla::load_panel<{DK}>", dstate.data,
                    T.access_ptr(dv[from_token, head, dv0 + w * 64], "r"), pitch,
                )  # fmt: skip
        T.call_extern("handle", f"qla::pin<{64 * DK // 128}>", dstate.data)
        T.copy(dstate, dstate_op)
        for i in T.serial(chunks):
            kq, ga, xb = i % KQ, i % NG, i % XB
            T.barrier_wait(xb_full[xb], (i // XB) % 2)
            T.call_extern("handle", "qla::forget", z.data)
            T.wgmma_gemm(dstate_op, x_s[xb, :, :], z, transpose_B=True, clear_accum=True, policy=rows)  # (X dS)ᵀ
            T.barrier_wait(g_full[ga], (i // NG) % 2)
            T.call_extern(
                "handle", "qla::load_operand", do_op.data, T.access_ptr(g_s[ga, 0, 0], "r"), warp_row,
                length - (chunks - 1 - i) * C,
            )  # fmt: skip
            T.barrier_arrive(g_free[ga])
            T.wgmma_gemm(do_op, b_s[xb, :, :], z, clear_accum=False, policy=rows)  # += dOᵀ B
            if stores:
                T.barrier_wait(s_free[w], (i + 1) % 2)
                T.call_extern("handle", f"qla::store_operand<{DK}>", dstate_op.data, T.access_ptr(s_s[w, 0, 0], "w"))
                T.fence_proxy_async()
                T.barrier_arrive(s_full[w])
            T.barrier_wait(kq_full[kq], (i // KQ) % 2)
            T.call_extern("handle", "qla::scale_operand", do_op.data, T.access_ptr(gamma_q[kq, 0], "r"), qdo_op.data)
            for r, c in T.Parallel(64, DK):
                dstate[r, c] *= gamma[kq, C - 1]
            T.wait_wgmma(0)
            T.wgmma_gemm(qdo_op, q_s[kq, :, :], dstate, clear_accum=False, policy=rows)  # += scale dOᵀ diag(γ) Q
            T.barrier_arrive(xb_free[xb])
            T.call_extern(
                "handle", "qla::round_and_negate", z.data, T.access_ptr(gamma[kq, 0], "r"), z_words.data, kz_op.data
            )
            T.wgmma_gemm(kz_op, k_s[kq, :, :], dstate, clear_accum=False, policy=rows)  # −= Zᵀ diag(γ) K
            if stores:
                T.barrier_wait(z_free[w], (i + 1) % 2)
                T.call_extern(
                    "handle", "qla::store_operand_transposed", z_words.data, T.access_ptr(z_s[w, 0, 0], "w"),
                    warp_row - w * 64,
                )  # fmt: skip
                T.fence_proxy_async()
                T.barrier_arrive(z_full[w])
            T.wait_wgmma(0)
            T.barrier_arrive(kq_free[kq])
            T.copy(dstate, dstate_op)
        if segmented:
            if to_rows:
                T.call_extern(
                    "handle", f"qla::save_panel<{DK}>", dstate.data,
                    T.access_ptr(dv[to_token, head, dv0 + w * 64], "w"), pitch,
                )  # fmt: skip
        if has_dinitial != 0:
            T.pdl_sync()  # for sequences without a chunk: whatever ran before has finished with `dinitial`
            T.call_extern(
                "handle", f"qla::save_state<{state_strides}>", dstate.data,
                T.access_ptr(dinitial[seq, head, *state_corner(dv0 + w * 64)], "w"),
            )  # fmt: skip

    @T.macro
    def run_store(w, chunks, length, warmup, token0, slot0, head, dv0, s_s, z_s, dstates, dv,
                  s_full, s_free, z_full, z_free):  # fmt: skip
        for i in T.serial(chunks):
            chunk = chunks - 1 - i
            T.barrier_wait(s_full[w], i % 2)
            if is_kept(i, warmup):
                T.copy(s_s[w, :, :], dstates[slot0 + chunk, head, dv0 + w * 64 : dv0 + w * 64 + 64, :])
            T.barrier_arrive(s_free[w])
            T.barrier_wait(z_full[w], i % 2)
            if is_whole(i, chunk, length, warmup):
                T.copy(
                    z_s[w, :, :],
                    dv[token0 + chunk * C : token0 + chunk * C + C, head, dv0 + w * 64 : dv0 + w * 64 + 64],
                )
            else:
                T.call_extern(
                    "handle", "qla::store_rows", T.access_ptr(z_s[w, 0, 0], "r"),
                    T.access_ptr(dv[token0 + chunk * C, head, dv0 + w * 64], "w"), pitch,
                    rows_kept(i, chunk, length, warmup),
                )  # fmt: skip
            T.barrier_arrive(z_free[w])

    @T.macro
    def run(block, q, k, do, a, log_gates, bounds, segments, turns, ends, dfinal, dinitial, dstates, dv, scale,
            has_dfinal, has_dinitial, log_tolerance):  # fmt: skip
        k_s = T.alloc_shared((KQ, C, DK), dtype)
        q_s = T.alloc_shared((KQ, C, DK), dtype)
        a_s = T.alloc_shared((NA, C, C), dtype)
        g_s = T.alloc_shared((NG, C, DVT), dtype)
        x_s = T.alloc_shared((XB, C, DK), dtype)
        b_s = T.alloc_shared((XB, C, C), dtype)
        gamma = T.alloc_shared((KQ, C), "float32", scope="shared")
        gamma_q = T.alloc_shared((KQ, C), "float32", scope="shared")
        tail = T.alloc_shared((KQ, C), "float32", scope="shared")
        decay = T.alloc_shared((KQ, DECAY_FLOATS), "float32", scope="shared")
        log_gamma = T.alloc_shared((KQ, C), "float32", scope="shared")
        layout = tilelang.layout
        T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in (g_s, x_s, b_s)})
        T.annotate_layout({a_s: layout.make_half_bank_swizzled_layout(a_s)})  # 32 columns, then the other 32
        kq_full = T.alloc_barrier(arrive_count=[64] * KQ)
        kq_free = T.alloc_barrier(arrive_count=[consumers + 128] * KQ)
        a_full = T.alloc_barrier(arrive_count=[32] * NA)
        a_free = T.alloc_barrier(arrive_count=[128] * NA)
        g_full = T.alloc_barrier(arrive_count=[32] * NG)
        g_free = T.alloc_barrier(arrive_count=[consumers] * NG)
        xb_full = T.alloc_barrier(arrive_count=[128] * XB)
        xb_free = T.alloc_barrier(arrive_count=[consumers] * XB)
        s_s = T.alloc_shared((GROUPS, 64, DK), dtype) if stores else None
        z_s = T.alloc_shared((GROUPS, C, 64), dtype) if stores else None
        s_full = T.alloc_barrier(arrive_count=[128] * GROUPS) if stores else None
        s_free = T.alloc_barrier(arrive_count=[32] * GROUPS) if stores else None
        z_full = T.alloc_barrier(arrive_count=[128] * GROUPS) if stores else None
        z_free = T.alloc_barrier(arrive_count=[32] * GROUPS) if stores else None
        if stores:
            T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in (s_s, z_s)})
        gates = T.alloc_local((2,), "float32")  # log₂ γ of two tokens, in the gate warp

        segment = segment_of(block // (HV * SPLIT), segments, turns) if segmented else 0
        seq = segments[segment, SEQUENCE] if segmented else block // (HV * SPLIT)
        head = block % (HV * SPLIT) // SPLIT
        dv0 = block % SPLIT * DVT
        first = segments[segment, FIRST] if segmented else 0
        count = segments[segment, COUNT] if segmented else 0
        token0 = bounds[seq] + first * C
        rest = bounds[seq + 1] - token0  # tokens to the end of the sequence
        slot0 = bounds[seq] // C + seq + first
        end = T.alloc_var("int32")  # chunks behind the segment that stand for all behind it; −1 where none do
        previous_end = T.alloc_var("int32")  # the same of the segment before
        end = 0
        previous_end = 0
        if segmented:
            T.pdl_sync()
            if stores:
                if first > 0 or count * C < rest:  # whole sequences have no code
                    end = ends[segment, head]
            else:
                if count * C < rest:
                    end = T.call_extern(
                        "int32", "qla::warmup_chunks", T.access_ptr(log_gates[slot0 + count - 1, head, C - 1], "r"),
                        -HV * C, T.min(segments[segment + 1, COUNT], T.ceildiv(rest, C) - count - 1), log_tolerance,
                    )  # fmt: skip
                if first > 0:
                    previous_end = T.call_extern(
                        "int32", "qla::warmup_chunks", T.access_ptr(log_gates[slot0 - 1, head, C - 1], "r"), -HV * C,
                        T.min(count, T.ceildiv(rest, C) - 1), log_tolerance,
                    )  # fmt: skip
                if block % SPLIT == 0 and T.get_thread_binding() == 0:
                    ends[segment, head] = end
        warmup = T.max(end, 0) if segmented else 0
        runs = T.cast(previous_end < 0, "int32") if segmented and not stores else 1
        length = T.min(rest, (count + warmup) * C) * runs if segmented else rest
        chunks = T.ceildiv(length, C)
        is_last = count * C >= rest
        takes_dfinal = T.cast(has_dfinal != 0 and is_last, "int32") if segmented else has_dfinal
        leaves_dinitial = T.cast(has_dinitial != 0 and first == 0, "int32") if segmented else has_dinitial
        from_rows = end < 0 if segmented and stores else False
        to_rows = previous_end < 0 if segmented and not stores else False
        to_token = bounds[seq] + segments[segment - 1, FIRST] * C if segmented and not stores else 0
        tx = T.get_thread_binding()
        if tx < end_of["state0"]:
            T.set_max_nreg(registers["state0"], 1)
            run_state(0, chunks, length, seq, head, dv0, takes_dfinal, leaves_dinitial, dfinal, dinitial,
                      from_rows, token0, to_rows, to_token, dv, k_s, q_s, g_s, x_s, b_s, s_s, z_s, gamma, gamma_q,
                      kq_full, kq_free, g_full, g_free, xb_full, xb_free, s_full, s_free, z_full, z_free)  # fmt: skip
        elif GROUPS == 2 and tx < end_of["state1"]:
            T.set_max_nreg(registers["state1"], 1)
            run_state(1, chunks, length, seq, head, dv0, takes_dfinal, leaves_dinitial, dfinal, dinitial,
                      from_rows, token0, to_rows, to_token, dv, k_s, q_s, g_s, x_s, b_s, s_s, z_s, gamma, gamma_q,
                      kq_full, kq_free, g_full, g_free, xb_full, xb_free, s_full, s_free, z_full, z_free)  # fmt: skip
        elif tx < end_of["operands"]:
            T.set_max_nreg(registers["operands"], int(registers["operands"] > launch_registers(table)))
            run_operands(chunks, length, scale, k_s, q_s, a_s, x_s, b_s, log_gamma, decay, tail,
                         kq_full, kq_free, a_full, a_free, xb_full, xb_free)  # fmt: skip
        else:
            T.set_max_nreg(registers["load"], 0)
            T.pdl_sync()
            if tx < first_load + 32:
                for i in T.serial(chunks):
                    kq, aa, ga = i % KQ, i % NA, i % NG
                    slot = slot0 + chunks - 1 - i
                    token = token0 + (chunks - 1 - i) * C
                    T.barrier_wait(kq_free[kq], (i // KQ + 1) % 2)
                    T.tma_copy(k[token : token + C, head // GROUP, :], k_s[kq, :, :], barrier=kq_full[kq])
                    T.tma_copy(q[token : token + C, head // GROUP, :], q_s[kq, :, :], barrier=kq_full[kq])
                    T.barrier_arrive(kq_full[kq])
                    T.barrier_wait(a_free[aa], (i // NA + 1) % 2)
                    T.tma_copy(a[slot, head, :, 0 : C // 2], a_s[aa, :, 0 : C // 2], barrier=a_full[aa])
                    T.tma_copy(
                        a[slot, head, C // 2 : C, C // 2 : C], a_s[aa, C // 2 : C, C // 2 : C], barrier=a_full[aa]
                    )
                    T.barrier_arrive(a_full[aa])
                    T.barrier_wait(g_free[ga], (i // NG + 1) % 2)
                    T.tma_copy(do[token : token + C, head, dv0 : dv0 + DVT], g_s[ga, :, :], barrier=g_full[ga])
                    T.barrier_arrive(g_full[ga])
            elif tx < first_load + 64:
                for i in T.serial(chunks):
                    kq = i % KQ
                    T.call_extern(
                        "handle", "qla::load_gates", gates.data,
                        T.access_ptr(log_gates[slot0 + chunks - 1 - i, head, 0], "r"),
                    )  # fmt: skip
                    T.barrier_wait(kq_free[kq], (i // KQ + 1) % 2)
                    T.call_extern(
                        "handle", "qla::write_gates", gates.data, scale, T.access_ptr(gamma[kq, 0], "w"),
                        T.access_ptr(gamma_q[kq, 0], "w"), T.access_ptr(tail[kq, 0], "w"),
                        T.access_ptr(log_gamma[kq, 0], "w"), T.access_ptr(decay[kq, 0], "w"),
                    )  # fmt: skip
                    T.barrier_arrive(kq_full[kq])
            elif stores and tx < first_load + 96:
                run_store(0, chunks, length, warmup, token0, slot0, head, dv0, s_s, z_s, dstates, dv,
                          s_full, s_free, z_full, z_free)  # fmt: skip
            elif stores and GROUPS == 2:
                run_store(1, chunks, length, warmup, token0, slot0, head, dv0, s_s, z_s, dstates, dv,
                          s_full, s_free, z_full, z_free)  # fmt: skip

    prelude = FRAGMENTS_CUDA + STORES_CUDA + (SEGMENTS_CUDA if segmented else "")
    if problem.kernel == "segment_gradient":

        @T.prim_func
        def segment_gradient(
            q: T.Tensor((num_tokens, H, DK), dtype),
            k: T.Tensor((num_tokens, H, DK), dtype),
            do: T.Tensor((num_tokens, HV, DV), dtype),
            a: T.Tensor((num_slots, HV, C, C), dtype),
            log_gates: T.Tensor((num_slots, HV, C), "float32"),
            bounds: T.Tensor((num_bounds,), "int32"),
            segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
            turns: T.Tensor((num_turns, TURN_FIELDS), "int32"),
            dfinal: T.Tensor((num_dfinal, HV, *state_shape), state_dtype),
            ends: T.Tensor((num_segments, HV), "int32"),
            dv: T.Tensor((num_tokens, HV, DV), dtype),
            scale: T.float32,
            has_dfinal: T.int32,
            log_tolerance: T.float32,
        ):
            with T.Kernel(num_turns * HV * SPLIT, threads=threads, prelude=prelude) as block:
                run(block, q, k, do, a, log_gates, bounds, segments, turns, ends, dfinal, None, None, dv, scale,
                    has_dfinal, 0, log_tolerance)  # fmt: skip

        return segment_gradient

    if problem.kernel == "segment_backward":

        @T.prim_func
        def segment_backward(
            q: T.Tensor((num_tokens, H, DK), dtype),
            k: T.Tensor((num_tokens, H, DK), dtype),
            do: T.Tensor((num_tokens, HV, DV), dtype),
            a: T.Tensor((num_slots, HV, C, C), dtype),
            log_gates: T.Tensor((num_slots, HV, C), "float32"),
            bounds: T.Tensor((num_bounds,), "int32"),
            segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
            ends: T.Tensor((num_segments, HV), "int32"),
            dfinal: T.Tensor((num_dfinal, HV, *state_shape), state_dtype),
            dinitial: T.Tensor((num_dinitial, HV, *state_shape), state_dtype),
            dstates: T.Tensor((num_slots, HV, DV, DK), dtype),
            dv: T.Tensor((num_tokens, HV, DV), dtype),
            scale: T.float32,
            has_dfinal: T.int32,
            has_dinitial: T.int32,
        ):
            with T.Kernel(num_segments * HV * SPLIT, threads=threads, prelude=prelude) as block:
                run(block, q, k, do, a, log_gates, bounds, segments, None, ends, dfinal, dinitial, dstates, dv, scale,
                    has_dfinal, has_dinitial, 0.0)  # fmt: skip

        return segment_backward

    @T.prim_func
    def backward_state(
        q: T.Tensor((num_tokens, H, DK), dtype),
        k: T.Tensor((num_tokens, H, DK), dtype),
        do: T.Tensor((num_tokens, HV, DV), dtype),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        dfinal: T.Tensor((num_dfinal, HV, *state_shape), state_dtype),
        dinitial: T.Tensor((num_dinitial, HV, *state_shape), state_dtype),
        dstates: T.Tensor((num_slots, HV, DV, DK), dtype),
        dv: T.Tensor((num_tokens, HV, DV), dtype),
        scale: T.float32,
        has_dfinal: T.int32,
        has_dinitial: T.int32,
    ):
        with T.Kernel((num_bounds - 1) * HV * SPLIT, threads=threads, prelude=prelude) as block:
            run(block, q, k, do, a, log_gates, bounds, None, None, None, dfinal, dinitial, dstates, dv, scale,
                has_dfinal, has_dinitial, 0.0)  # fmt: skip

    return backward_state


TEMPLATE = Template(
    kernel="backward_state",
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
    sources=(
        "backward_state_sm90.py",
        "operands_sm90.py",
        "warp_groups_sm90.py",
        "backward_sm90.py",
        "fragments_sm90.py",
    ),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
