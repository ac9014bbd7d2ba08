"""What a segment leaves of the state it starts from, on Hopper: S ← M S + S*; warp-specialised.

The state recurrence of `fused_forward` without outputs, on columns of [V | −γ K]: with γ the product of the segment's
gates up to a token, the columns of V leave S* and those of keys leave D = M − γ I, from a zero start and by the same
products (MATH.md (10)-(12)):

    X = diag(γ_C/γ) Ãᵀ K        Y = F − diag(γ) K S        S ← γ_C S + Xᵀ Y        F = V, or −diag(γ γ_before) K

A CTA owns `columns` of them for one (segment, value head).  It decides by the gates what there is to do (`segments`):

| start of the segment    | first               | window holds     | otherwise                               |
| ----------------------- | ------------------- | ---------------- | --------------------------------------- |
| columns of V            | initial, or 0       | 0, chunks before | 0; the correction adds what came before |
| columns of keys         | nothing             | nothing          | D and γ                                 |
| `starts[segment, head]` | −1 (see below) or 0 | chunks before    | −1: from its rows of `o`                |

and nothing at all where the window of the next segment holds, or where there is none.  With `for_backward`, key columns
also run where the gradient that leaves the segment is known to the backward's correction only.  CTAs take the segments
of cut sequences, in the order of `turns`.  The initial state of a
cut sequence is copied to its first segment's rows, because the final state may be written over it before that one
starts.

| role      | warps  | per chunk, in order                            | waits for       | signals          |
| --------- | ------ | ---------------------------------------------- | --------------- | ---------------- |
| load      | 1      | TMA K; Ã without its zero quarter; V or K      | k/a/v_free      | k/a/v_full       |
| gates     | 1      | log γ → γ, factor of F, γ_C/γ                  | k_free          | k_full           |
| operands  | 4      | Ãᵀ K γ_C/γ → X                                 | k/a_full, x_free | x_full, k/a_free |
| state × n | 4 each | K S → Y → Xᵀ Y; S rounded for the next chunk   | k/v/x_full      | k/v/x_free       |

Stages: K and gates `stages_k`; Ã, V two each; X `stages_x`.  Products, barriers and ptxas' rules as in `fused_forward`.
May start before `kkt_inverse` has ended; its own dependents may start at once (programmatic dependent launch).
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .fragments_sm90 import FRAGMENTS_CUDA
from .operands_sm90 import operands_role
from .segments_sm90 import (
    OF_AFTER,
    OF_BEFORE,
    OF_CHUNKS,
    OF_COUNT,
    OF_FIRST,
    OF_SEGMENT,
    OF_SEQUENCE,
    OF_TOKEN,
    SEGMENTS_CUDA,
    TURN_FIELDS,
    deviation_tile,
)
from .warp_groups_sm90 import launch_registers, register_rules

NAME = "segment_state_sm90"
STAGES_A = 2
STAGES_V = 2

#: load/operands/state registers per thread.  Two state groups share 512 per lane of the register file; one has 504.
REGISTERS = ("40/104/184", "32/96/192", "40/168/240")

PARAMETERS = (
    Parameter("columns", (64, 128), 128, "columns of [V | K] that one CTA owns, 64 per state group"),
    Parameter("stages_k", (2, 3), 3, "K and gate stages"),
    Parameter("stages_x", (1, 2), 2, "X stages between `operands` and `state`"),
    Parameter("registers", REGISTERS, "40/104/184", "registers per thread of load, operands and each state group"),
)


def state_groups(problem: Problem, schedule: Schedule) -> int:
    """Warp groups that hold the state, 64 columns each."""
    return schedule["columns"] // 64


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    """Warp groups in thread order; `prim_func` branches on this table."""
    load, operands, state = (int(n) for n in schedule["registers"].split("/"))
    groups = state_groups(problem, schedule)
    return (
        *(Role(f"state{w}", 4, state, f"columns {64 * w}..{64 * w + 63}: Y, S") for w in range(groups)),
        Role("operands", 4, operands, "X, ahead of the state"),
        Role("load", 4, load, "warp 0: TMA loads; warp 1: gates"),
    )


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk = problem.chunk_size, problem.head_dim_k
    stages, columns = schedule["stages_k"], schedule["columns"]
    return (
        SharedBuffer("k", stages * c * dk, 2),
        SharedBuffer("a", STAGES_A * c * c, 2),
        SharedBuffer("v", STAGES_V * c * columns, 2),
        SharedBuffer("x", schedule["stages_x"] * c * dk, 2),
        SharedBuffer("gates", stages * 3 * c, 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of each ring."""
    return 2 * (schedule["stages_k"] + STAGES_A + STAGES_V + schedule["stages_x"])


def work(problem: Problem, schedule: Schedule) -> Work:
    """Of a chunk whose transfer matrix is needed."""
    c, dk, dv = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    parts = (dk + dv) // schedule["columns"]
    flops = 2 * c * dk * (dk + dv) * 2 + parts * 2 * c * c * dk  # K S, Xt Y; X
    inverse = 2 * c * c * 3 // 4  # without its zero quarter
    read = 2 * c * dv + 2 * c * dk + parts * (2 * c * dk // problem.group_size + inverse + 4 * c)
    return Work(flops=flops, bytes_read=read, bytes_written=0)


def _columns_divide(problem: Problem, schedule: Schedule, arch) -> str | None:
    columns, dims = schedule["columns"], (problem.head_dim_k, problem.head_dim_v)
    return (
        f"columns={columns} does not divide head_dim_k, head_dim_v = {dims}" if any(d % columns for d in dims) else None
    )


RULES = (
    Rule("columns_divide_the_head_dims", _columns_divide),
    *register_rules(roles),
)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """One state group where a head dim is 64; it and `operands` take the registers that are over."""
    if min(problem.head_dim_k, problem.head_dim_v) == 64:
        return schedule.replace(columns=64, registers="40/168/240")
    return schedule


def unsupported(problem: Problem) -> str | None:
    return None if problem.chunk_size == 64 else f"chunk_size={problem.chunk_size} (WGMMA tiles have 64 rows)"


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK, DV = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    COLUMNS, GROUPS = schedule["columns"], state_groups(problem, schedule)
    PARTS_V, PARTS = DV // COLUMNS, (DV + DK) // COLUMNS
    TILES = DK // 64  # of D: see `deviation_tile`
    KS, XS, NA, NV = schedule["stages_k"], schedule["stages_x"], STAGES_A, STAGES_V
    dtype, state_dtype = problem.dtype, problem.state_dtype
    v_first = problem.state_v_first
    state_shape = (DV, DK) if v_first else (DK, DV)
    state_strides = f"{DK}, {DK}, 1" if v_first else f"{DK}, 1, {DV}"  # as in fused_forward
    pitch = HV * DV  # of a token in o
    table = roles(problem, schedule)
    registers = {role.name: role.registers for role in table}
    end = {role.name: sum(r.threads for r in table[: i + 1]) for i, role in enumerate(table)}  # past its last thread
    consumers, threads, first_load = 128 * GROUPS, end["load"], end["operands"]
    rows = T.GemmWarpPolicy.FullRow
    run_operands = operands_role(C, DK, KS, NA, XS, whole_chunks=True)

    def state_corner(row):
        """Where column 0 of a row of Sᵀ is in a state's last two dims."""
        return (row, 0) if v_first else (0, row)

    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_segments = T.dynamic("num_segments")
    num_turns = T.dynamic("num_turns")
    num_initial = T.dynamic("num_initial")
    num_sequences = T.dynamic("num_sequences")

    @T.macro
    def run_state(w, chunks, part, seq, head, takes_initial, keeps_start, segment_token, next_token,
                  state_rows, initial, o, k_s, v_s, x_s, gamma, factor,
                  k_full, k_free, v_full, v_free, x_full, x_free):  # fmt: skip
        state = T.alloc_fragment((64, DK), "float32")
        state_op = T.alloc_fragment((64, DK), dtype)
        y = T.alloc_fragment((64, C), "float32")
        y_op = T.alloc_fragment((64, C), dtype)
        values = T.alloc_local((16,), "uint32")  # this warp's 16 columns of V, as packed pairs
        warp_row = w * 64 + ((T.get_thread_binding() // 32) % 4) * 16
        if takes_initial:
            T.call_extern(
                "handle", f"qla::load_state<{state_strides}>", state.data,
                T.access_ptr(initial[state_rows[seq], head, *state_corner(part * COLUMNS + w * 64)], "r"),
            )  # fmt: skip
        else:
            T.clear(state)
        if keeps_start:
            T.call_extern(
                "handle", f"qla::save_panel<{DK}>", state.data,
                T.access_ptr(o[segment_token, head, part * COLUMNS + w * 64], "w"), pitch,
            )  # fmt: skip
        T.call_extern("handle", f"qla::pin<{64 * DK // 128}>", state.data)
        T.copy(state, state_op)
        for i in T.serial(chunks):
            kk, va, xx = i % KS, i % NV, i % XS
            T.barrier_wait(k_full[kk], (i // KS) % 2)
            T.call_extern("handle", "qla::forget", y.data)
            T.wgmma_gemm(state_op, k_s[kk, :, :], y, transpose_B=True, clear_accum=True, policy=rows)  # (K S)ᵀ
            for r, c in T.Parallel(64, DK):
                state[r, c] *= gamma[kk, C - 1]
            T.barrier_wait(v_full[va], (i // NV) % 2)
            T.call_extern("handle", "qla::load_values", values.data, T.access_ptr(v_s[va, 0, 0], "r"), warp_row)
            T.wait_wgmma(0)
            T.call_extern(
                "handle", "qla::subtract_from_scaled", y.data, values.data, T.access_ptr(factor[kk, 0], "r"),
                T.access_ptr(gamma[kk, 0], "r"), y_op.data,
            )  # fmt: skip
            T.barrier_arrive(k_free[kk])
            T.barrier_arrive(v_free[va])
            T.barrier_wait(x_full[xx], (i // XS) % 2)
            T.wgmma_gemm(y_op, x_s[xx, :, :], state, clear_accum=False, policy=rows)  # += Yᵀ X
            T.wait_wgmma(0)
            T.barrier_arrive(x_free[xx])
            T.copy(state, state_op)
        if chunks > 0:
            if part < PARTS_V:
                T.call_extern(
                    "handle", f"qla::save_panel<{DK}>", state.data,
                    T.access_ptr(o[next_token, head, part * COLUMNS + w * 64], "w"), pitch,
                )  # fmt: skip
            else:
                for tile in T.unroll(TILES):
                    column = (part - PARTS_V) * COLUMNS + w * 64  # of K: row of this group in Dᵀ
                    rounded, rounded_panel = deviation_tile(problem, tile)
                    lost, lost_panel = deviation_tile(problem, TILES + tile)
                    T.call_extern(
                        "handle", "qla::save_in_two", state.data, tile * 32,
                        T.access_ptr(o[segment_token + rounded + column, head, rounded_panel * 64], "w"),
                        T.access_ptr(o[segment_token + lost + column, head, lost_panel * 64], "w"), pitch,
                    )  # fmt: skip

    @T.prim_func
    def segment_state(
        k: T.Tensor((num_tokens, H, DK), dtype),
        v: T.Tensor((num_tokens, HV, DV), dtype),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
        turns: T.Tensor((num_turns, TURN_FIELDS), "int32"),
        state_rows: T.Tensor((num_sequences,), "int32"),
        initial: T.Tensor((num_initial, HV, *state_shape), state_dtype),
        starts: T.Tensor((num_segments, HV), "int32"),
        decays: T.Tensor((num_segments, HV), "float32"),
        o: T.Tensor((num_tokens, HV, DV), dtype),
        has_initial: T.int32,
        log_tolerance: T.float32,
        for_backward: T.int32,
    ):
        with T.Kernel(num_turns * HV * PARTS, threads=threads, prelude=FRAGMENTS_CUDA + SEGMENTS_CUDA) as block:
            k_s = T.alloc_shared((KS, C, DK), dtype)
            a_s = T.alloc_shared((NA, C, C), dtype)
            v_s = T.alloc_shared((NV, C, COLUMNS), dtype)
            x_s = T.alloc_shared((XS, C, DK), dtype)
            gamma = T.alloc_shared((KS, C), "float32", scope="shared")
            factor = T.alloc_shared((KS, C), "float32", scope="shared")
            tail = T.alloc_shared((KS, C), "float32", scope="shared")
            layout = tilelang.layout
            T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in (v_s, x_s)})
            T.annotate_layout({a_s: layout.make_half_bank_swizzled_layout(a_s)})  # 32 columns, then the other 32
            k_full = T.alloc_barrier(arrive_count=[64] * KS)
            k_free = T.alloc_barrier(arrive_count=[consumers + 128] * KS)
            a_full = T.alloc_barrier(arrive_count=[32] * NA)
            a_free = T.alloc_barrier(arrive_count=[128] * NA)
            v_full = T.alloc_barrier(arrive_count=[32] * NV)
            v_free = T.alloc_barrier(arrive_count=[consumers] * NV)
            x_full = T.alloc_barrier(arrive_count=[128] * XS)
            x_free = T.alloc_barrier(arrive_count=[consumers] * XS)

            T.pdl_trigger()
            gates = T.alloc_local((2,), "float32")  # log₂ γ of two tokens, in the gate warp
            decay = T.alloc_var("float32")  # log₂ γ of the chunks before, there too
            window = T.alloc_var("int32")  # chunks before this segment that stand for all before it, or −1
            next_window = T.alloc_var("int32")
            end_window = T.alloc_var("int32")  # chunks after this segment that do so for the backward, or −1
            chunks = T.alloc_var("int32")

            part = block % PARTS
            head = block % (HV * PARTS) // PARTS
            turn = block // (HV * PARTS)
            segment = turns[turn, OF_SEGMENT]
            seq = turns[turn, OF_SEQUENCE]
            first = turns[turn, OF_FIRST]
            count = turns[turn, OF_COUNT]
            seq_token0 = turns[turn, OF_TOKEN]
            seq_chunks = turns[turn, OF_CHUNKS]
            before = T.min(turns[turn, OF_BEFORE], first - 1)  # chunks that this segment's window may have
            after = T.min(turns[turn, OF_AFTER], seq_chunks - first - count - 1)  # that of the backward
            seq_slot0 = seq_token0 // C + seq
            takes_initial = first == 0 and part < PARTS_V and has_initial != 0 and state_rows[seq] >= 0
            is_last = first + count >= seq_chunks
            keeps_start = takes_initial and not is_last
            tx = T.get_thread_binding()
            T.pdl_sync()
            next_window = 0
            if not is_last:
                next_window = T.call_extern(
                    "int32", "qla::warmup_chunks",
                    T.access_ptr(log_gates[seq_slot0 + first + count, head, C - 1], "r"), HV * C,
                    T.min(count, first + count - 1), log_tolerance,
                )  # fmt: skip
            end_window = 0
            if for_backward != 0 and not is_last:
                end_window = T.call_extern(
                    "int32", "qla::warmup_chunks",
                    T.access_ptr(log_gates[seq_slot0 + first + count - 1, head, C - 1], "r"), -HV * C, after,
                    log_tolerance,
                )  # fmt: skip
            # One CTA says where the segment starts; the others ask only if they may have something to do.
            window = 0
            if first > 0 and (part == 0 or next_window < 0 or end_window < 0):
                window = T.call_extern(
                    "int32", "qla::warmup_chunks", T.access_ptr(log_gates[seq_slot0 + first, head, C - 1], "r"), HV * C,
                    before, log_tolerance,
                )  # fmt: skip
            if part == 0 and tx == 0:
                starts[segment, head] = T.if_then_else(keeps_start, -1, window)
            chunks = 0
            skipped = T.if_then_else(part < PARTS_V, T.max(window, 0), 0)
            if part < PARTS_V:
                if next_window < 0:
                    chunks = count + skipped
            elif first > 0:
                # The backward sums gates the other way round, so its windows do not follow from next_window.
                if (next_window < 0 and window < 0) or end_window < 0:
                    chunks = count
            token0 = seq_token0 + (first - skipped) * C
            slot0 = seq_slot0 + first - skipped
            segment_token = seq_token0 + first * C
            next_token = seq_token0 + (first + count) * C
            if tx < end["state0"]:
                T.set_max_nreg(registers["state0"], 1)
                run_state(0, chunks, part, seq, head, takes_initial, keeps_start, segment_token, next_token,
                          state_rows, initial, o, k_s, v_s, x_s, gamma, factor,
                          k_full, k_free, v_full, v_free, x_full, x_free)  # fmt: skip
            elif GROUPS == 2 and tx < end["state1"]:
                T.set_max_nreg(registers["state1"], 1)
                run_state(1, chunks, part, seq, head, takes_initial, keeps_start, segment_token, next_token,
                          state_rows, initial, o, k_s, v_s, x_s, gamma, factor,
                          k_full, k_free, v_full, v_free, x_full, x_free)  # fmt: skip
            elif tx < end["operands"]:
                T.set_max_nreg(registers["operands"], int(registers["operands"] > launch_registers(table)))
                run_operands(chunks, chunks * C, k_s, a_s, x_s, tail, k_full, k_free, a_full, a_free, x_full, x_free)
            else:
                T.set_max_nreg(registers["load"], 0)
                if tx < first_load + 32:
                    for i in T.serial(chunks):
                        kk, aa, va = i % KS, i % NA, i % NV
                        token = token0 + i * C
                        T.barrier_wait(k_free[kk], (i // KS + 1) % 2)
                        T.tma_copy(k[token : token + C, head // GROUP, :], k_s[kk, :, :], barrier=k_full[kk])
                        T.barrier_arrive(k_full[kk])
                        T.barrier_wait(a_free[aa], (i // NA + 1) % 2)
                        T.tma_copy(a[slot0 + i, head, :, 0 : C // 2], a_s[aa, :, 0 : C // 2], barrier=a_full[aa])
                        T.tma_copy(
                            a[slot0 + i, head, C // 2 : C, C // 2 : C], a_s[aa, C // 2 : C, C // 2 : C],
                            barrier=a_full[aa],
                        )  # fmt: skip
                        T.barrier_arrive(a_full[aa])
                        T.barrier_wait(v_free[va], (i // NV + 1) % 2)
                        if part < PARTS_V:
                            T.tma_copy(
                                v[token : token + C, head, part * COLUMNS : part * COLUMNS + COLUMNS], v_s[va, :, :],
                                barrier=v_full[va],
                            )  # fmt: skip
                        else:
                            column = (part - PARTS_V) * COLUMNS
                            T.tma_copy(
                                k[token : token + C, head // GROUP, column : column + COLUMNS], v_s[va, :, :],
                                barrier=v_full[va],
                            )  # fmt: skip
                        T.barrier_arrive(v_full[va])
                elif tx < first_load + 64:
                    decay = 0.0
                    if chunks > 0:
                        T.call_extern(
                            "handle", "qla::load_gates", gates.data, T.access_ptr(log_gates[slot0, head, 0], "r")
                        )
                    for i in T.serial(chunks):
                        kk = i % KS
                        T.barrier_wait(k_free[kk], (i // KS + 1) % 2)
                        decay = T.call_extern(
                            "float32", "qla::write_state_gates", gates.data, decay, T.cast(part >= PARTS_V, "int32"),
                            T.access_ptr(gamma[kk, 0], "w"), T.access_ptr(factor[kk, 0], "w"),
                            T.access_ptr(tail[kk, 0], "w"),
                        )  # fmt: skip
                        if i + 1 < chunks:
                            T.call_extern(
                                "handle", "qla::load_gates", gates.data,
                                T.access_ptr(log_gates[slot0 + i + 1, head, 0], "r"),
                            )  # fmt: skip
                        T.barrier_arrive(k_full[kk])
                    if part == PARTS_V and chunks > 0 and tx == first_load + 32:
                        decays[segment, head] = decay

    return segment_state


TEMPLATE = Template(
    kernel="segment_state",
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
        "segment_state_sm90.py",
        "operands_sm90.py",
        "warp_groups_sm90.py",
        "segments_sm90.py",
        "fragments_sm90.py",
    ),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
