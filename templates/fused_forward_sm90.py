"""Fused forward of one (sequence, value head) on Hopper: state recurrence and output, warp-specialised.

Two-step form of MATH.md (6)-(9), with Ã = A' diag(β) from `kkt_inverse` and Y = V − diag(γ) K S:

    B = tril(Q Kᵀ) Ã      X = diag(γ_C/γ) Ãᵀ K                       (independent of S, made ahead by `operands`)
    O = scale (diag(γ) Q S + (B∘Γ) Y)      S ← γ_C S + Xᵀ Y          (two dependent products per chunk, `state`)

The state is kept transposed, Sᵀ [d_v, d_k] in fp32 accumulators, 64 rows of d_v per state group, so that an
accumulator is, after rounding, the register operand of the next product.

| role      | warps  | per chunk, in order                            | waits for            | signals              |
| --------- | ------ | ---------------------------------------------- | -------------------- | -------------------- |
| load      | 1      | TMA K, Q; Ã without its zero quarter; V        | kq/a/v_free          | kq/a/v_full          |
| gates     | 1      | log γ → γ, scale·γ, γ_C/γ, scale·Γ in factors  | kq_free              | kq_full              |
| store × n | 1 each | O tile to memory (TMA; masked rows at a tail)  | o_full               | o_free               |
| operands  | 4      | Q Kᵀ → P; P Ã ∘Γ → B; Ãᵀ K γ_C/γ → X           | kq/a_full, xb_free   | xb_full, kq/a_free   |
| state × n | 4 each | K S, Q S → Y → Xᵀ Y → γ Q S + B Y → O tile; S  | kq/v/xb_full, o_free | kq/v/xb_free, o_full |
|           |        | rounded for the next chunk; checkpoints        |                      |                      |

Stages: K, Q and gates `stages_kq`; Ã, V two each; X and B `stages_xb`; O one per state group (n of them).
Registers per role come from the schedule.  TileLang's own barrier insertion is off: all exchange between threads goes
through one of the mbarriers above, or (in `operands`, at the start and at a partial chunk) named barrier 2, and
accumulators stay in their threads.  The kernel may start before `kkt_inverse` has ended (programmatic dependent
launch): K, Q, V and states are read at once, Ã and gates after `pdl_sync`, and nothing is written before it.

Rules that ptxas imposes (it serialises every product of the kernel otherwise): no product in flight at the end of the
loop body, none issued under a condition, and no more accumulators and operands between two full waits than registers.
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .fragments_sm90 import DECAY_FLOATS, FRAGMENTS_CUDA
from .operands_sm90 import two_step_operands_role
from .segments_sm90 import COUNT, FIRST, SEGMENT_FIELDS, SEGMENTS_CUDA, SEQUENCE, TURN
from .warp_groups_sm90 import launch_registers, register_rules

NAME = "fused_forward_sm90"
STAGES_A = 2
STAGES_V = 2
GAMMA_AHEAD = 1  # pairs of γ that a state group loads before K S is known; more spill

#: load/operands/state registers per thread.  Two state groups share 512 per lane of the register file, one state group
#: has the launch's 504; below 104 the operands group spills, below 192 K S and Q S do not fit beside the state.
REGISTERS = ("24/104/192", "40/168/240", "40/216/240")

PARAMETERS = (
    Parameter("dv_split", (1, 2, 4), 1, "CTAs that share one value head, each with head_dim_v / dv_split columns"),
    Parameter("stages_kq", (2, 3), 3, "K, Q and gate stages; three let `operands` run a chunk ahead"),
    Parameter("stages_xb", (1, 2), 2, "X and B stages between `operands` and `state`"),
    Parameter("registers", REGISTERS, "24/104/192", "registers per thread of load, operands and each state group"),
)


def dv_tile(problem: Problem, schedule: Schedule) -> int:
    """Columns of d_v that one CTA owns."""
    return problem.head_dim_v // schedule["dv_split"]


def state_groups(problem: Problem, schedule: Schedule) -> int:
    """Warp groups that hold the state, 64 rows of d_v each."""
    return dv_tile(problem, schedule) // 64


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    """Warp groups in thread order; `prim_func` branches on this table."""
    load, operands, state = (int(n) for n in schedule["registers"].split("/"))
    groups = state_groups(problem, schedule)
    return (
        *(Role(f"state{w}", 4, state, f"rows {64 * w}..{64 * w + 63} of Sᵀ: Y, S, O") for w in range(groups)),
        Role("operands", 4, operands, "Q Kᵀ, B and X, ahead of the state"),
        Role("load", 4, load, "warp 0: TMA loads; warp 1: gates; warps 2 and 3: O tiles of the state groups"),
    )


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, dv_tile(problem, schedule)
    kq, xb = schedule["stages_kq"], schedule["stages_xb"]
    return (
        SharedBuffer("k", kq * c * dk, 2),
        SharedBuffer("q", kq * c * dk, 2),
        SharedBuffer("a", STAGES_A * c * c, 2),
        SharedBuffer("v", STAGES_V * c * dv, 2),
        SharedBuffer("x", xb * c * dk, 2),
        SharedBuffer("b", xb * c * c, 2),
        SharedBuffer("o", c * dv, 2),
        SharedBuffer("gates", kq * (4 * c + DECAY_FLOATS), 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of each ring."""
    rings = schedule["stages_kq"] + STAGES_A + STAGES_V + schedule["stages_xb"]
    return 2 * (rings + state_groups(problem, schedule))


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    split = schedule["dv_split"]
    state = 2 * c * dk * dv * 3 + 2 * c * c * dv  # K S, Q S, Xt Y, B Y
    operands = split * (2 * c * c * dk * 2 + 2 * c**3)  # Q Kt, X, B
    inverse = 2 * c * c * 3 // 4  # without its zero quarter
    read = 2 * c * dv + split * (2 * 2 * c * dk // problem.group_size + inverse + 4 * c)
    return Work(flops=state + operands, bytes_read=read, bytes_written=2 * c * dv)


def _whole_groups(problem: Problem, schedule: Schedule, arch) -> str | None:
    tile = dv_tile(problem, schedule)
    return f"head_dim_v / dv_split = {tile} is not 64 or 128" if tile not in (64, 128) else None


RULES = (
    Rule("dv_tile_is_one_or_two_groups", _whole_groups),
    *register_rules(roles),
)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """At most two state groups; one leaves registers over: give them to it and to `operands`."""
    schedule = schedule.replace(dv_split=max(1, problem.head_dim_v // 128))
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
    KQ, XB, NA, NV = schedule["stages_kq"], schedule["stages_xb"], STAGES_A, STAGES_V
    dtype, state_dtype = problem.dtype, problem.state_dtype
    v_first = problem.state_v_first
    state_shape = (DV, DK) if v_first else (DK, DV)
    # Columns of Sᵀ, then in memory from row to row and from column to column.
    state_strides = f"{DK}, {DK}, 1" if v_first else f"{DK}, 1, {DV}"
    segmented = problem.kernel == "segment_forward"
    table = roles(problem, schedule)
    registers = {role.name: role.registers for role in table}
    end = {role.name: sum(r.threads for r in table[: i + 1]) for i, role in enumerate(table)}  # past its last thread
    consumers, threads, first_load = 128 * GROUPS, end["load"], end["operands"]
    rows = T.GemmWarpPolicy.FullRow
    run_operands = two_step_operands_role(C, DK, KQ, NA, XB, dtype)

    def state_corner(row):
        """Where column 0 of a row of Sᵀ is in a state's last two dims."""
        return (row, 0) if v_first else (0, row)

    def start_code(bounds, segments, starts, seq, segment, head):
        """`starts` of a segment; whole sequences have none and start from their initial state."""
        first, count = segments[segment, FIRST], segments[segment, COUNT]
        is_whole_sequence = T.And(first == 0, count * C >= bounds[seq + 1] - bounds[seq])
        return T.if_then_else(is_whole_sequence, 0, starts[segment, head])

    def first_checkpoint(every, chunk0, warmup):
        """Chunks until the first checkpoint of a segment that starts ``warmup`` chunks after chunk0."""
        return every - T.truncmod(chunk0 + warmup, every) + warmup if segmented else every

    def is_whole(i, length, warmup):
        """Whether all 64 rows of O of chunk i are the segment's own; those of its warm-up are of the one before."""
        whole = length - i * C >= C
        return T.And(whole, i >= warmup) if segmented else whole

    def rows_kept(i, length, warmup):
        return T.if_then_else(i >= warmup, length - i * C, 0) if segmented else length - i * C

    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")
    num_initial = T.dynamic("num_initial")
    num_final = T.dynamic("num_final")
    num_sequences = T.dynamic("num_sequences")
    num_checkpoints = T.dynamic("num_checkpoints")
    num_segments = T.dynamic("num_segments")

    @T.macro
    def run_state(w, chunks, length, seq, head, dv0, chunk0, warmup, start, token0, o,
                  state_rows, has_initial, has_final, initial, final,
                  checkpoint_rows, chunks_per_checkpoint, checkpoints,
                  k_s, q_s, v_s, x_s, b_s, o_s, gamma, gamma_q,
                  kq_full, kq_free, v_full, v_free, xb_full, xb_free, o_full, o_free):  # fmt: skip
        state = T.alloc_fragment((64, DK), "float32")
        state_op = T.alloc_fragment((64, DK), dtype)
        y = T.alloc_fragment((64, C), "float32")
        y_op = T.alloc_fragment((64, C), dtype)
        out = T.alloc_fragment((64, C), "float32")
        values = T.alloc_local((16,), "uint32")  # this warp's 16 columns of V, as packed pairs
        first_gamma = T.alloc_local((2 * GAMMA_AHEAD,), "float32")  # γ of this thread's first tokens
        factors = T.alloc_local((16,), "float32")  # scale · γ of this thread's tokens
        warp_row = w * 64 + ((T.get_thread_binding() // 32) % 4) * 16
        until_checkpoint = T.alloc_var("int32")  # chunks; never reached if there are none
        until_checkpoint = T.if_then_else(
            chunks_per_checkpoint > 0, first_checkpoint(chunks_per_checkpoint, chunk0, warmup), chunks + 1
        )
        if has_initial != 0 and state_rows[seq] >= 0:
            T.call_extern(
                "handle", f"qla::load_state<{state_strides}>", state.data,
                T.access_ptr(initial[state_rows[seq], head, *state_corner(dv0 + w * 64)], "r"),
            )  # fmt: skip
        else:
            T.clear(state)
        if segmented:
            if start < 0:
                T.call_extern(
                    "handle", f"qla::load_panel<{DK}>", state.data,
                    T.access_ptr(o[token0, head, dv0 + w * 64], "r"), HV * DV,
                )  # fmt: skip
        T.call_extern("handle", f"qla::pin<{64 * DK // 128}>", state.data)
        T.copy(state, state_op)
        for i in T.serial(chunks):
            kq, va, xb = i % KQ, i % NV, i % XB
            T.barrier_wait(kq_full[kq], (i // KQ) % 2)
            T.call_extern("handle", "qla::forget", y.data)
            T.wgmma_gemm(state_op, k_s[kq, :, :], y, transpose_B=True, clear_accum=True, policy=rows)  # (K S)ᵀ
            T.call_extern("handle", "qla::forget", out.data)
            T.wgmma_gemm(state_op, q_s[kq, :, :], out, transpose_B=True, clear_accum=True, policy=rows)  # (Q S)ᵀ
            for r, c in T.Parallel(64, DK):
                state[r, c] *= gamma[kq, C - 1]
            T.barrier_wait(v_full[va], (i // NV) % 2)
            T.call_extern("handle", "qla::load_values", values.data, T.access_ptr(v_s[va, 0, 0], "r"), warp_row)
            T.call_extern(
                "handle", f"qla::load_factors<{GAMMA_AHEAD}>", first_gamma.data, T.access_ptr(gamma[kq, 0], "r")
            )
            T.wait_wgmma(1)
            T.call_extern(
                "handle", f"qla::subtract_from_values<{GAMMA_AHEAD}>", y.data, values.data, first_gamma.data,
                T.access_ptr(gamma[kq, 0], "r"), length - i * C, y_op.data,
            )  # fmt: skip
            T.call_extern("handle", "qla::load_factors<8>", factors.data, T.access_ptr(gamma_q[kq, 0], "r"))
            T.barrier_wait(xb_full[xb], (i // XB) % 2)
            T.wgmma_gemm(y_op, x_s[xb, :, :], state, clear_accum=False, policy=rows)  # += Yᵀ X
            T.wait_wgmma(1)
            T.call_extern("handle", "qla::scale_columns", out.data, factors.data)
            T.wgmma_gemm(y_op, b_s[xb, :, :], out, transpose_B=True, clear_accum=False, policy=rows)  # += Yᵀ Bᵀ
            T.wait_wgmma(0)
            T.barrier_arrive(v_free[va])
            T.barrier_arrive(xb_free[xb])
            T.barrier_wait(o_free[w], (i + 1) % 2)
            T.call_extern(
                "handle", "qla::store_transposed", out.data, T.access_ptr(o_s[w, 0, 0], "w"), warp_row - w * 64
            )
            T.barrier_arrive(kq_free[kq])
            T.copy(state, state_op)  # of the next chunk, while the stores land
            T.fence_proxy_async()
            T.barrier_arrive(o_full[w])
            until_checkpoint = until_checkpoint - 1
            if until_checkpoint == 0:
                if length >= i * C + C:
                    passed = T.truncdiv(chunk0 + i + 1, chunks_per_checkpoint)
                    row = checkpoint_rows[seq] + passed - 1
                    T.call_extern(
                        "handle", f"qla::save_state<{state_strides}>", state.data,
                        T.access_ptr(checkpoints[row, head, *state_corner(dv0 + w * 64)], "w"),
                    )  # fmt: skip
                until_checkpoint = chunks_per_checkpoint
        T.pdl_sync()  # for sequences without a chunk: whatever ran before has finished with `final`
        if has_final != 0 and state_rows[seq] >= 0:
            T.call_extern(
                "handle", f"qla::save_state<{state_strides}>", state.data,
                T.access_ptr(final[state_rows[seq], head, *state_corner(dv0 + w * 64)], "w"),
            )  # fmt: skip

    @T.macro
    def run_store(w, chunks, length, warmup, token0, head, dv0, o_s, o, o_full, o_free):
        for i in T.serial(chunks):
            T.barrier_wait(o_full[w], i % 2)
            if is_whole(i, length, warmup):
                T.copy(o_s[w, :, :], o[token0 + i * C : token0 + i * C + C, head, dv0 + w * 64 : dv0 + w * 64 + 64])
            else:
                T.call_extern(
                    "handle", "qla::store_rows", T.access_ptr(o_s[w, 0, 0], "r"),
                    T.access_ptr(o[token0 + i * C, head, dv0 + w * 64], "w"), HV * DV, rows_kept(i, length, warmup),
                )  # fmt: skip
            T.barrier_arrive(o_free[w])

    @T.macro
    def run(block, q, k, v, a, log_gates, bounds, segments, starts, state_rows, checkpoint_rows, initial, final,
            checkpoints, o, scale, has_initial, has_final, chunks_per_checkpoint):  # fmt: skip
        k_s = T.alloc_shared((KQ, C, DK), dtype)
        q_s = T.alloc_shared((KQ, C, DK), dtype)
        a_s = T.alloc_shared((NA, C, C), dtype)
        v_s = T.alloc_shared((NV, C, DVT), dtype)
        x_s = T.alloc_shared((XB, C, DK), dtype)
        b_s = T.alloc_shared((XB, C, C), dtype)
        o_s = T.alloc_shared((GROUPS, C, 64), dtype)
        gamma = T.alloc_shared((KQ, C), "float32", scope="shared")
        gamma_q = T.alloc_shared((KQ, C), "float32", scope="shared")
        tail = T.alloc_shared((KQ, C), "float32", scope="shared")
        decay = T.alloc_shared((KQ, DECAY_FLOATS), "float32", scope="shared")
        log_gamma = T.alloc_shared((KQ, C), "float32", scope="shared")
        layout = tilelang.layout
        T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in (v_s, x_s, b_s, o_s)})
        T.annotate_layout({a_s: layout.make_half_bank_swizzled_layout(a_s)})  # 32 columns, then the other 32
        kq_full = T.alloc_barrier(arrive_count=[64] * KQ)
        kq_free = T.alloc_barrier(arrive_count=[consumers + 128] * KQ)
        a_full = T.alloc_barrier(arrive_count=[32] * NA)
        a_free = T.alloc_barrier(arrive_count=[128] * NA)
        v_full = T.alloc_barrier(arrive_count=[32] * NV)
        v_free = T.alloc_barrier(arrive_count=[consumers] * NV)
        xb_full = T.alloc_barrier(arrive_count=[128] * XB)
        xb_free = T.alloc_barrier(arrive_count=[consumers] * XB)
        o_full = T.alloc_barrier(arrive_count=[128] * GROUPS)
        o_free = T.alloc_barrier(arrive_count=[32] * GROUPS)

        gates = T.alloc_local((2,), "float32")  # log₂ γ of two tokens, in the gate warp

        segment = segments[block // (HV * SPLIT), TURN] if segmented else 0
        seq = segments[segment, SEQUENCE] if segmented else block // (HV * SPLIT)
        head = block % (HV * SPLIT) // SPLIT
        dv0 = block % SPLIT * DVT
        if segmented:
            T.pdl_sync()
        start = start_code(bounds, segments, starts, seq, segment, head) if segmented else 0
        warmup = T.max(start, 0) if segmented else 0
        chunk0 = segments[segment, FIRST] - warmup if segmented else 0
        token0 = bounds[seq] + chunk0 * C if segmented else bounds[seq]
        rest = bounds[seq + 1] - token0
        length = T.min(rest, (segments[segment, COUNT] + warmup) * C) if segmented else rest
        chunks = T.ceildiv(length, C)
        slot0 = bounds[seq] // C + seq + chunk0 if segmented else token0 // C + seq
        takes_initial = T.cast(has_initial != 0 and chunk0 == 0 and start == 0, "int32") if segmented else has_initial
        leaves_final = T.cast(has_final != 0 and length == rest, "int32") if segmented else has_final
        tx = T.get_thread_binding()
        if tx < end["state0"]:
            T.set_max_nreg(registers["state0"], 1)
            run_state(0, chunks, length, seq, head, dv0, chunk0, warmup, start, token0, o,
                      state_rows, takes_initial, leaves_final, initial, final,
                      checkpoint_rows, chunks_per_checkpoint, checkpoints,
                      k_s, q_s, v_s, x_s, b_s, o_s, gamma, gamma_q,
                      kq_full, kq_free, v_full, v_free, xb_full, xb_free, o_full, o_free)  # fmt: skip
        elif GROUPS == 2 and tx < end["state1"]:
            T.set_max_nreg(registers["state1"], 1)
            run_state(1, chunks, length, seq, head, dv0, chunk0, warmup, start, token0, o,
                      state_rows, takes_initial, leaves_final, initial, final,
                      checkpoint_rows, chunks_per_checkpoint, checkpoints,
                      k_s, q_s, v_s, x_s, b_s, o_s, gamma, gamma_q,
                      kq_full, kq_free, v_full, v_free, xb_full, xb_free, o_full, o_free)  # fmt: skip
        elif tx < end["operands"]:
            T.set_max_nreg(registers["operands"], int(registers["operands"] > launch_registers(table)))
            run_operands(chunks, length, scale, k_s, q_s, a_s, x_s, b_s, log_gamma, decay, tail,
                         kq_full, kq_free, a_full, a_free, xb_full, xb_free)  # fmt: skip
        else:
            T.set_max_nreg(registers["load"], 0)
            if tx < first_load + 32:
                for i in T.serial(chunks):
                    kq, aa, va = i % KQ, i % NA, i % NV
                    first = token0 + i * C
                    T.barrier_wait(kq_free[kq], (i // KQ + 1) % 2)
                    T.tma_copy(k[first : first + C, head // GROUP, :], k_s[kq, :, :], barrier=kq_full[kq])
                    T.tma_copy(q[first : first + C, head // GROUP, :], q_s[kq, :, :], barrier=kq_full[kq])
                    T.barrier_arrive(kq_full[kq])
                    if i == 0:
                        T.pdl_sync()
                    T.barrier_wait(a_free[aa], (i // NA + 1) % 2)
                    T.tma_copy(a[slot0 + i, head, :, 0 : C // 2], a_s[aa, :, 0 : C // 2], barrier=a_full[aa])
                    T.tma_copy(
                        a[slot0 + i, head, C // 2 : C, C // 2 : C], a_s[aa, C // 2 : C, C // 2 : C],
                        barrier=a_full[aa],
                    )  # fmt: skip
                    T.barrier_arrive(a_full[aa])
                    T.barrier_wait(v_free[va], (i // NV + 1) % 2)
                    T.tma_copy(v[first : first + C, head, dv0 : dv0 + DVT], v_s[va, :, :], barrier=v_full[va])
                    T.barrier_arrive(v_full[va])
            elif tx < first_load + 64:
                T.pdl_sync()
                if chunks > 0:
                    T.call_extern("handle", "qla::load_gates", gates.data, T.access_ptr(log_gates[slot0, head, 0], "r"))
                for i in T.serial(chunks):
                    kq = i % KQ
                    T.barrier_wait(kq_free[kq], (i // KQ + 1) % 2)
                    T.call_extern(
                        "handle", "qla::write_gates", gates.data, scale, T.access_ptr(gamma[kq, 0], "w"),
                        T.access_ptr(gamma_q[kq, 0], "w"), T.access_ptr(tail[kq, 0], "w"),
                        T.access_ptr(log_gamma[kq, 0], "w"), T.access_ptr(decay[kq, 0], "w"),
                    )  # fmt: skip
                    if i + 1 < chunks:
                        T.call_extern(
                            "handle", "qla::load_gates", gates.data,
                            T.access_ptr(log_gates[slot0 + i + 1, head, 0], "r"),
                        )  # fmt: skip
                    T.barrier_arrive(kq_full[kq])
            elif tx < first_load + 96:
                run_store(0, chunks, length, warmup, token0, head, dv0, o_s, o, o_full, o_free)
            elif GROUPS == 2:
                run_store(1, chunks, length, warmup, token0, head, dv0, o_s, o, o_full, o_free)

    if segmented:

        @T.prim_func
        def segment_forward(
            q: T.Tensor((num_tokens, H, DK), dtype),
            k: T.Tensor((num_tokens, H, DK), dtype),
            v: T.Tensor((num_tokens, HV, DV), dtype),
            a: T.Tensor((num_slots, HV, C, C), dtype),
            log_gates: T.Tensor((num_slots, HV, C), "float32"),
            bounds: T.Tensor((num_bounds,), "int32"),
            segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
            starts: T.Tensor((num_segments, HV), "int32"),
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
            with T.Kernel(num_segments * HV * SPLIT, threads=threads, prelude=FRAGMENTS_CUDA + SEGMENTS_CUDA) as block:
                run(block, q, k, v, a, log_gates, bounds, segments, starts, state_rows, checkpoint_rows, initial, final,
                    checkpoints, o, scale, has_initial, has_final, chunks_per_checkpoint)  # fmt: skip

        return segment_forward

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
        with T.Kernel((num_bounds - 1) * HV * SPLIT, threads=threads, prelude=FRAGMENTS_CUDA) as block:
            run(block, q, k, v, a, log_gates, bounds, None, None, state_rows, checkpoint_rows, initial, final,
                checkpoints, o, scale, has_initial, has_final, chunks_per_checkpoint)  # fmt: skip

    return fused_forward


TEMPLATE = Template(
    kernel="fused_forward",
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
    sources=("fused_forward_sm90.py", "operands_sm90.py", "warp_groups_sm90.py", "fragments_sm90.py"),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
