"""States before every chunk, for the backward, on Hopper: the state recurrence of `fused_forward`; warp-specialised.

    X = diag(γ_C/γ) Ãᵀ K        Y = V − diag(γ) K S        S ← γ_C S + Xᵀ Y
    B = tril(K Kᵀ, −1) Ã        E = Y − (B∘Γ) Y

E is U / β, β zero or not, and all that the gradients need of Y.  Leaves, of each chunk, Sᵀ before it as the products
read it (`states`), and E (`effects`), both in the dtype of V.

| role      | warps  | per chunk, in order                           | waits for             | signals               |
| --------- | ------ | --------------------------------------------- | --------------------- | --------------------- |
| load      | 1      | TMA K; Ã without its zero quarter; V          | k/a/v_free            | k/a/v_full            |
| gates     | 1      | log γ → γ, γ_C/γ, −Γ                          | k_free                | k_full                |
| store × n | 1 each | Sᵀ, E tiles to memory (TMA; rows at a tail)   | s/e_full              | s/e_free              |
| operands  | 4      | K Kᵀ, Ã → −B∘Γ; Ãᵀ K γ_C/γ → X                | k/a_full, xb_free     | xb_full, k/a_free     |
| state × n | 4 each | Sᵀ tile; K S → Y → Xᵀ Y, E; E tile; S rounded | k/v/xb_full, s/e_free | k/v/xb_free, s/e_full |

Stages: K and gates `stages_k`; Ã, V two each; X with B `stages_x`; the tiles that leave one per state group (n of
them).
Products, barriers and ptxas' rules as in `fused_forward`.  May start before `kkt_inverse` has ended (programmatic
dependent launch).
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .backward_sm90 import STORES_CUDA, WHOLE_GROUPS, dv_tile, state_groups
from .fragments_sm90 import DECAY_FLOATS, FRAGMENTS_CUDA
from .operands_sm90 import two_step_operands_role
from .segments_sm90 import COUNT, FIRST, SEGMENT_FIELDS, SEGMENTS_CUDA, SEQUENCE, TURN
from .warp_groups_sm90 import launch_registers, register_rules

NAME = "recompute_state_sm90"
STAGES_A = 2
STAGES_V = 2

#: load/operands/state registers per thread.  Two state groups share 512 per lane of the register file; one has 504.
REGISTERS = ("40/104/184", "40/168/240")

PARAMETERS = (
    Parameter("dv_split", (1, 2, 4), 1, "CTAs that share one value head, each with head_dim_v / dv_split columns"),
    Parameter("stages_k", (2, 3), 3, "K and gate stages"),
    Parameter("stages_x", (1, 2), 2, "stages of X and B between `operands` and `state`"),
    Parameter("registers", REGISTERS, "40/104/184", "registers per thread of load, operands and each state group"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    """Warp groups in thread order; `prim_func` branches on this table."""
    load, operands, state = (int(n) for n in schedule["registers"].split("/"))
    groups = state_groups(problem, schedule)
    return (
        *(Role(f"state{w}", 4, state, f"columns {64 * w}..{64 * w + 63}: E, S") for w in range(groups)),
        Role("operands", 4, operands, "X and B, ahead of the state"),
        Role("load", 4, load, "warp 0: TMA loads; warp 1: gates; warps 2 and 3: tiles of the state groups"),
    )


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, dv_tile(problem, schedule)
    stages = schedule["stages_k"]
    return (
        SharedBuffer("k", stages * c * dk, 2),
        SharedBuffer("a", STAGES_A * c * c, 2),
        SharedBuffer("v", STAGES_V * c * dv, 2),
        SharedBuffer("x", schedule["stages_x"] * c * dk, 2),
        SharedBuffer("b", schedule["stages_x"] * c * c, 2),
        SharedBuffer("s", dv * dk, 2),
        SharedBuffer("e", c * dv, 2),
        SharedBuffer("gates", stages * (3 * c + DECAY_FLOATS), 4),
    )


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of each ring."""
    rings = schedule["stages_k"] + STAGES_A + STAGES_V + schedule["stages_x"]
    return 2 * (rings + 2 * state_groups(problem, schedule))


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, dv, split = problem.chunk_size, problem.head_dim_k, problem.head_dim_v, schedule["dv_split"]
    flops = 2 * c * dk * dv * 2 + 2 * c * c * dv + split * (2 * 2 * c * c * dk + 2 * c**3)  # K S, Xt Y; B Y; X, K Kt; B
    inverse = 2 * c * c * 3 // 4  # without its zero quarter
    read = 2 * c * dv + split * (2 * c * dk // problem.group_size + inverse + 4 * c)
    return Work(flops=flops, bytes_read=read, bytes_written=2 * dk * dv + 2 * c * dv)


RULES = (
    WHOLE_GROUPS,
    *register_rules(roles),
)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """At most two state groups; where one is enough, it and `operands` take the registers that are over."""
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
    KS, XS, NA, NV = schedule["stages_k"], schedule["stages_x"], STAGES_A, STAGES_V
    dtype, state_dtype = problem.dtype, problem.state_dtype
    v_first = problem.state_v_first
    state_shape = (DV, DK) if v_first else (DK, DV)
    state_strides = f"{DK}, {DK}, 1" if v_first else f"{DK}, 1, {DV}"  # as in fused_forward
    segmented = problem.kernel == "segment_recompute"
    pitch = HV * DV  # of a token in effects
    table = roles(problem, schedule)
    registers = {role.name: role.registers for role in table}
    end = {role.name: sum(r.threads for r in table[: i + 1]) for i, role in enumerate(table)}  # past its last thread
    consumers, threads, first_load = 128 * GROUPS, end["load"], end["operands"]
    rows = T.GemmWarpPolicy.FullRow
    run_operands = two_step_operands_role(C, DK, KS, NA, XS, dtype, strict=True)

    def state_corner(row):
        """Where column 0 of a row of Sᵀ is in a state's last two dims."""
        return (row, 0) if v_first else (0, row)

    def start_code(bounds, segments, starts, seq, segment, head):
        """`starts` of a segment; whole sequences have none and start from their initial state."""
        first, count = segments[segment, FIRST], segments[segment, COUNT]
        is_whole_sequence = T.And(first == 0, count * C >= bounds[seq + 1] - bounds[seq])
        return T.if_then_else(is_whole_sequence, 0, starts[segment, head])

    def is_kept(i, warmup):
        """Whether chunk i is the segment's own; those of its warm-up are of the one before."""
        return i >= warmup if segmented else True

    def is_whole(i, length, warmup):
        whole = length - i * C >= C
        return T.And(whole, i >= warmup) if segmented else whole

    def rows_kept(i, length, warmup):
        return T.if_then_else(i >= warmup, length - i * C, 0) if segmented else length - i * C

    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")
    num_initial = T.dynamic("num_initial")
    num_segments = T.dynamic("num_segments")

    @T.macro
    def run_state(w, chunks, length, seq, head, dv0, start, token0, effects, has_initial, initial,
                  k_s, v_s, x_s, b_s, s_s, e_s, gamma, k_full, k_free, v_full, v_free, xb_full, xb_free,
                  s_full, s_free, e_full, e_free):  # fmt: skip
        state = T.alloc_fragment((64, DK), "float32")
        state_op = T.alloc_fragment((64, DK), dtype)
        y = T.alloc_fragment((64, C), "float32")
        y_op = T.alloc_fragment((64, C), dtype)
        values = T.alloc_local((16,), "uint32")  # this warp's 16 columns of V, as packed pairs
        first_gamma = T.alloc_local((2,), "float32")  # γ of this thread's first tokens
        warp_row = w * 64 + ((T.get_thread_binding() // 32) % 4) * 16
        if has_initial != 0:
            T.call_extern(
                "handle", f"qla::load_state<{state_strides}>", state.data,
                T.access_ptr(initial[seq, head, *state_corner(dv0 + w * 64)], "r"),
            )  # fmt: skip
        else:
            T.clear(state)
        if segmented:
            if start < 0:
                T.call_extern(
                    "handle", f"qla::load_panel<{DK}>", state.data,
                    T.access_ptr(effects[token0, head, dv0 + w * 64], "r"), pitch,
                )  # fmt: skip
        T.call_extern("handle", f"qla::pin<{64 * DK // 128}>", state.data)
        T.copy(state, state_op)
        for i in T.serial(chunks):
            kk, va, xx = i % KS, i % NV, i % XS
            T.barrier_wait(k_full[kk], (i // KS) % 2)
            T.call_extern("handle", "qla::forget", y.data)
            T.wgmma_gemm(state_op, k_s[kk, :, :], y, transpose_B=True, clear_accum=True, policy=rows)  # (K S)ᵀ
            T.barrier_wait(s_free[w], (i + 1) % 2)
            T.call_extern("handle", f"qla::store_operand<{DK}>", state_op.data, T.access_ptr(s_s[w, 0, 0], "w"))
            T.fence_proxy_async()
            T.barrier_arrive(s_full[w])
            for r, c in T.Parallel(64, DK):
                state[r, c] *= gamma[kk, C - 1]
            T.barrier_wait(v_full[va], (i // NV) % 2)
            T.call_extern("handle", "qla::load_values", values.data, T.access_ptr(v_s[va, 0, 0], "r"), warp_row)
            T.call_extern("handle", "qla::load_factors<1>", first_gamma.data, T.access_ptr(gamma[kk, 0], "r"))
            T.wait_wgmma(0)
            T.call_extern(
                "handle", "qla::left_of_values<1>", y.data, values.data, first_gamma.data,
                T.access_ptr(gamma[kk, 0], "r"), length - i * C, y_op.data,
            )  # fmt: skip
            T.barrier_arrive(k_free[kk])
            T.barrier_arrive(v_free[va])
            T.barrier_wait(xb_full[xx], (i // XS) % 2)
            T.wgmma_gemm(y_op, x_s[xx, :, :], state, clear_accum=False, policy=rows)  # += Yᵀ X
            T.wgmma_gemm(y_op, b_s[xx, :, :], y, transpose_B=True, clear_accum=False, policy=rows)  # −= Yᵀ (B∘Γ)ᵀ
            T.wait_wgmma(0)
            T.barrier_arrive(xb_free[xx])
            T.barrier_wait(e_free[w], (i + 1) % 2)
            T.call_extern("handle", "qla::store_transposed", y.data, T.access_ptr(e_s[w, 0, 0], "w"), warp_row - w * 64)
            T.copy(state, state_op)  # of the next chunk, while the stores land
            T.fence_proxy_async()
            T.barrier_arrive(e_full[w])

    @T.macro
    def run_store(w, chunks, length, warmup, token0, slot0, head, dv0, s_s, e_s, states, effects,
                  s_full, s_free, e_full, e_free):  # fmt: skip
        for i in T.serial(chunks):
            T.barrier_wait(s_full[w], i % 2)
            if is_kept(i, warmup):
                T.copy(s_s[w, :, :], states[slot0 + i, head, dv0 + w * 64 : dv0 + w * 64 + 64, :])
            T.barrier_arrive(s_free[w])
            T.barrier_wait(e_full[w], i % 2)
            if is_whole(i, length, warmup):
                T.copy(
                    e_s[w, :, :],
                    effects[token0 + i * C : token0 + i * C + C, head, dv0 + w * 64 : dv0 + w * 64 + 64],
                )
            else:
                T.call_extern(
                    "handle", "qla::store_rows", T.access_ptr(e_s[w, 0, 0], "r"),
                    T.access_ptr(effects[token0 + i * C, head, dv0 + w * 64], "w"), pitch,
                    rows_kept(i, length, warmup),
                )  # fmt: skip
            T.barrier_arrive(e_free[w])

    @T.macro
    def run(block, k, v, a, log_gates, bounds, segments, starts, initial, states, effects, has_initial):
        k_s = T.alloc_shared((KS, C, DK), dtype)
        a_s = T.alloc_shared((NA, C, C), dtype)
        v_s = T.alloc_shared((NV, C, DVT), dtype)
        x_s = T.alloc_shared((XS, C, DK), dtype)
        b_s = T.alloc_shared((XS, C, C), dtype)
        s_s = T.alloc_shared((GROUPS, 64, DK), dtype)
        e_s = T.alloc_shared((GROUPS, C, 64), dtype)
        gamma = T.alloc_shared((KS, C), "float32", scope="shared")
        tail = T.alloc_shared((KS, C), "float32", scope="shared")
        decay = T.alloc_shared((KS, DECAY_FLOATS), "float32", scope="shared")
        log_gamma = T.alloc_shared((KS, C), "float32", scope="shared")
        layout = tilelang.layout
        T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in (v_s, x_s, b_s, s_s, e_s)})
        T.annotate_layout({a_s: layout.make_half_bank_swizzled_layout(a_s)})  # 32 columns, then the other 32
        k_full = T.alloc_barrier(arrive_count=[64] * KS)
        k_free = T.alloc_barrier(arrive_count=[consumers + 128] * KS)
        a_full = T.alloc_barrier(arrive_count=[32] * NA)
        a_free = T.alloc_barrier(arrive_count=[128] * NA)
        v_full = T.alloc_barrier(arrive_count=[32] * NV)
        v_free = T.alloc_barrier(arrive_count=[consumers] * NV)
        xb_full = T.alloc_barrier(arrive_count=[128] * XS)
        xb_free = T.alloc_barrier(arrive_count=[consumers] * XS)
        s_full = T.alloc_barrier(arrive_count=[128] * GROUPS)
        s_free = T.alloc_barrier(arrive_count=[32] * GROUPS)
        e_full = T.alloc_barrier(arrive_count=[128] * GROUPS)
        e_free = T.alloc_barrier(arrive_count=[32] * GROUPS)
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
        token0 = bounds[seq] + chunk0 * C
        rest = bounds[seq + 1] - token0
        length = T.min(rest, (segments[segment, COUNT] + warmup) * C) if segmented else rest
        chunks = T.ceildiv(length, C)
        slot0 = bounds[seq] // C + seq + chunk0
        takes_initial = T.cast(has_initial != 0 and chunk0 == 0 and start == 0, "int32") if segmented else has_initial
        tx = T.get_thread_binding()
        if tx < end["state0"]:
            T.set_max_nreg(registers["state0"], 1)
            run_state(0, chunks, length, seq, head, dv0, start, token0, effects, takes_initial, initial,
                      k_s, v_s, x_s, b_s, s_s, e_s, gamma, k_full, k_free, v_full, v_free, xb_full, xb_free,
                      s_full, s_free, e_full, e_free)  # fmt: skip
        elif GROUPS == 2 and tx < end["state1"]:
            T.set_max_nreg(registers["state1"], 1)
            run_state(1, chunks, length, seq, head, dv0, start, token0, effects, takes_initial, initial,
                      k_s, v_s, x_s, b_s, s_s, e_s, gamma, k_full, k_free, v_full, v_free, xb_full, xb_free,
                      s_full, s_free, e_full, e_free)  # fmt: skip
        elif tx < end["operands"]:
            T.set_max_nreg(registers["operands"], int(registers["operands"] > launch_registers(table)))
            run_operands(chunks, length, -1.0, k_s, k_s, a_s, x_s, b_s, log_gamma, decay, tail,
                         k_full, k_free, a_full, a_free, xb_full, xb_free)  # fmt: skip
        else:
            T.set_max_nreg(registers["load"], 0)
            T.pdl_sync()
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
                    T.tma_copy(v[token : token + C, head, dv0 : dv0 + DVT], v_s[va, :, :], barrier=v_full[va])
                    T.barrier_arrive(v_full[va])
            elif tx < first_load + 64:
                for i in T.serial(chunks):
                    kk = i % KS
                    T.call_extern(
                        "handle", "qla::load_gates", gates.data,
                        T.access_ptr(log_gates[slot0 + i, head, 0], "r"),
                    )  # fmt: skip
                    T.barrier_wait(k_free[kk], (i // KS + 1) % 2)
                    T.call_extern(
                        "handle", "qla::write_gates", gates.data, -1.0, T.access_ptr(gamma[kk, 0], "w"),
                        T.access_ptr(tail[kk, 0], "w"), T.access_ptr(tail[kk, 0], "w"),
                        T.access_ptr(log_gamma[kk, 0], "w"), T.access_ptr(decay[kk, 0], "w"),
                    )  # fmt: skip
                    T.barrier_arrive(k_full[kk])
            elif tx < first_load + 96:
                run_store(0, chunks, length, warmup, token0, slot0, head, dv0, s_s, e_s, states, effects,
                          s_full, s_free, e_full, e_free)  # fmt: skip
            elif GROUPS == 2:
                run_store(1, chunks, length, warmup, token0, slot0, head, dv0, s_s, e_s, states, effects,
                          s_full, s_free, e_full, e_free)  # fmt: skip

    prelude = FRAGMENTS_CUDA + STORES_CUDA + (SEGMENTS_CUDA if segmented else "")
    if segmented:

        @T.prim_func
        def segment_recompute(
            k: T.Tensor((num_tokens, H, DK), dtype),
            v: T.Tensor((num_tokens, HV, DV), dtype),
            a: T.Tensor((num_slots, HV, C, C), dtype),
            log_gates: T.Tensor((num_slots, HV, C), "float32"),
            bounds: T.Tensor((num_bounds,), "int32"),
            segments: T.Tensor((num_segments, SEGMENT_FIELDS), "int32"),
            starts: T.Tensor((num_segments, HV), "int32"),
            initial: T.Tensor((num_initial, HV, *state_shape), state_dtype),
            states: T.Tensor((num_slots, HV, DV, DK), dtype),
            effects: T.Tensor((num_tokens, HV, DV), dtype),
            has_initial: T.int32,
        ):
            with T.Kernel(num_segments * HV * SPLIT, threads=threads, prelude=prelude) as block:
                run(block, k, v, a, log_gates, bounds, segments, starts, initial, states, effects, has_initial)

        return segment_recompute

    @T.prim_func
    def recompute_state(
        k: T.Tensor((num_tokens, H, DK), dtype),
        v: T.Tensor((num_tokens, HV, DV), dtype),
        a: T.Tensor((num_slots, HV, C, C), dtype),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        initial: T.Tensor((num_initial, HV, *state_shape), state_dtype),
        states: T.Tensor((num_slots, HV, DV, DK), dtype),
        effects: T.Tensor((num_tokens, HV, DV), dtype),
        has_initial: T.int32,
    ):
        with T.Kernel((num_bounds - 1) * HV * SPLIT, threads=threads, prelude=prelude) as block:
            run(block, k, v, a, log_gates, bounds, None, None, initial, states, effects, has_initial)

    return recompute_state


TEMPLATE = Template(
    kernel="recompute_state",
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
        "recompute_state_sm90.py",
        "operands_sm90.py",
        "warp_groups_sm90.py",
        "backward_sm90.py",
        "fragments_sm90.py",
    ),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
