"""Gradients of Q, K, β and the gates of one (chunk, key head) on Hopper, warp-specialised.

From what the other kernels of the backward leave of every value head of the key head, the state S before the chunk,
E = U / β, the gradient dS of the state that leaves it, and Z = dV; L = tril(K Kᵀ, −1):

    D₁ = dO Eᵀ      D₂ = Z Eᵀ      X = scale tril(Q Kᵀ)∘Γ∘D₁ − L∘Γ∘D₂
    dP = scale tril(D₁)∘Γ diag(β)           W = −tril(D₂, −1)∘Γ diag(β)       M = tril(X, −1) diag(β)
    dQ = Σ scale diag(γ) dO Sᵀ + dP K        dK = Σ dPᵀ Q + diag(β γ_C/γ) E dSᵀ − diag(γ) Z Sᵀ + (W + Wᵀ) K
    dβ = column sums of X + κ               κ = γ_C/γ · row dots of K with E dSᵀ
    d log γ = row dots of Q with scale γ dO Sᵀ, less those of K with γ Z Sᵀ, − β κ + row − column sums of M;
              the chunk's last token also γ_C ⟨S, dS⟩ + Σ β κ;  dg is its sum from the token to the chunk's end

Chunks do not wait for each other.  A CTA has the chunks of `chunks_per_cta` slots, one after another, each with the
value heads of its key head in turn: dQ and dK stay in accumulators over them and are written once, so results do not
depend on the order in which CTAs run.

| role     | warps | per value head, in order                                   | waits for       | signals         |
| -------- | ----- | ---------------------------------------------------------- | --------------- | --------------- |
| load     | 1     | TMA K, Q (a chunk); E; dO; S; Z; dS                        | tile_free       | tile_full       |
| gates    | 1     | gates and β of the next head; dβ and dg of this one        | sums_full       | gates_full      |
| dots     | 2     | ⟨S, dS⟩                                                    | s, ds           | s, ds           |
| products | 4     | Q Kᵀ, D₁ → dP tile; K Kᵀ, D₂ → W + Wᵀ tile; sums of X, M   | e, do, z        | e, do, z        |
|          |       |                                                            | dp_free         | dp/w_full       |
| dq       | 4     | dO Sᵀ and its dots with Q; dP K                            | do, s, dp_full  | do, s, dp_free  |
| dk       | 4     | Z Sᵀ, E dSᵀ and their dots with K; dPᵀ Q; (W + Wᵀ) K       | z, s, e, ds     | z, s, e, ds     |
|          |       |                                                            | dp/w_full       | dp_free (W's)   |

Stages: K with Q `stages_kq`; E `stages_e`; dO `stages_do`; gates with the sums of a head two; all else one.
The last two columns name what the load warp brings by its tiles; every role also waits for `gates_full`, arrives at
`sums_full` when it has left its sums of a head and needs the head's gates no more, and at the free barrier of K and Q
after the last head.  In a partial chunk the load warp clears the rows past the end before it passes a tile on, and β is
taken as 0 there.  All exchange between threads goes through mbarriers.  Products, registers and ptxas' rules as in
`fused_forward_sm90`.
"""

from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

from .fragments_sm90 import FRAGMENTS_CUDA
from .gradients_sm90 import GRADIENTS_CUDA, Gate, Sum

NAME = "backward_grad_sm90"
HEAD_STAGES = 2  # of gates and sums

#: load/products/dq/dk registers per thread.
REGISTERS = ("40/192/136/144", "40/184/144/144")

PARAMETERS = (
    Parameter("chunks_per_cta", (1, 2, 4), 2, "slots whose chunks a CTA has one after another"),
    Parameter("stages_kq", (1, 2), 2, "K and Q stages; two load the next chunk's while this one ends"),
    Parameter("stages_e", (1, 2), 1, "E stages"),
    Parameter("stages_do", (1, 2), 2, "dO stages"),
    Parameter("registers", REGISTERS, REGISTERS[0], "registers per thread of load, products, dq and dk"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    """Warp groups in thread order; `prim_func` branches on this table."""
    load, products, dq, dk = (int(n) for n in schedule["registers"].split("/"))
    return (
        Role("products", 4, products, "what is [C, C]: dP, W, sums of X"),
        Role("dq", 4, dq, "dO Sᵀ, dP K"),
        Role("dk", 4, dk, "Z Sᵀ, E dSᵀ, dPᵀ Q, (W + Wᵀ) K"),
        Role("load", 4, load, "warp 0: TMA loads; warp 1: gates, dβ, dg; warps 2 and 3: ⟨S, dS⟩"),
    )


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    c, dk, dv = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    kq = schedule["stages_kq"]
    return (
        SharedBuffer("k", kq * c * dk, 2),
        SharedBuffer("q", kq * c * dk, 2),
        SharedBuffer("e", schedule["stages_e"] * c * dv, 2),
        SharedBuffer("do", schedule["stages_do"] * c * dv, 2),
        SharedBuffer("z", c * dv, 2),
        SharedBuffer("s", dv * dk, 2),
        SharedBuffer("ds", dv * dk, 2),
        SharedBuffer("dp", c * c, 2),
        SharedBuffer("w", c * c, 2),
        SharedBuffer("gates", HEAD_STAGES * Gate.COUNT * c, 4),
        SharedBuffer("sums", HEAD_STAGES * Sum.COUNT * c, 4),
        SharedBuffer("chunks", 3 * schedule["chunks_per_cta"] + 1, 4),
    )


def tile_stages(schedule: Schedule) -> tuple[int, ...]:
    """Stages of the rings that the load warp fills: K with Q, E, dO, Z, S, dS."""
    return schedule["stages_kq"], schedule["stages_e"], schedule["stages_do"], 1, 1, 1


def barriers(problem: Problem, schedule: Schedule) -> int:
    """mbarriers of a CTA: full and free of each ring and of dP; W; gates and sums; one for partial chunks."""
    return 2 * (sum(tile_stages(schedule)) + 1 + HEAD_STAGES) + 2


def work(problem: Problem, schedule: Schedule) -> Work:
    c, dk, dv, group = problem.chunk_size, problem.head_dim_k, problem.head_dim_v, problem.group_size
    square = 2 * c * c * (2 * dk + 2 * dv)  # K Kt, Q Kt; D1, D2
    flops = square + 2 * c * dk * dv * 3 + 2 * c * c * dk * 3  # dO St, Z St, E dSt; dP K, dPt Q, (W + Wt) K
    read = 2 * 3 * c * dv + 2 * 2 * dk * dv + 2 * 4 * c + 2 * 2 * c * dk // group
    return Work(flops=flops, bytes_read=read, bytes_written=2 * 2 * c * dk // group + 2 * 4 * c)


def _small(problem: Problem) -> bool:
    return problem.head_dim_k * problem.head_dim_v <= 64 * 128


def _known_to_spill(problem: Problem, schedule: Schedule, arch) -> str | None:
    if _small(problem) or schedule["stages_kq"] == 1:
        return None
    stages = schedule["stages_e"], schedule["stages_do"]
    if problem.group_size != 2 and stages == (1, 2) and schedule["registers"] == REGISTERS[0]:
        return None
    return (
        f"two stages of K and Q spill 4 to 12 B, but beside one of E and two of dO with {REGISTERS[0]} registers, "
        "and with two value heads per key head in any case"
    )


RULES = (Rule("does_not_spill", _known_to_spill),)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """Where the head dims leave room, the next head's E is loaded ahead, too; where K and Q have one stage, as well."""
    if _small(problem):
        return schedule.replace(stages_e=2)
    return schedule.replace(stages_kq=1, stages_e=2) if problem.group_size == 2 else schedule


def unsupported(problem: Problem) -> str | None:
    if problem.chunk_size != 64:
        return f"chunk_size={problem.chunk_size} (WGMMA tiles have 64 rows)"
    if problem.head_dim_v > 128:
        return f"head_dim_v={problem.head_dim_v} (S and dS of a chunk must fit into shared memory; at most 128)"
    return None


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang  # no postponed annotations in this module: T.prim_func evaluates them
    import tilelang.language as T

    C, DK, DV = problem.chunk_size, problem.head_dim_k, problem.head_dim_v
    H, HV, GROUP = problem.num_heads, problem.num_value_heads, problem.group_size
    SLOTS, (KQ, ES, DO, *_) = schedule["chunks_per_cta"], tile_stages(schedule)
    # Places of the rings in `tile_full` and `tile_free`; the last of `tile_full` is of tiles of a partial chunk.
    first_kq, first_e, first_do, z_tile, s_tile, ds_tile, partial = (
        sum(tile_stages(schedule)[:i]) for i in range(len(tile_stages(schedule)) + 1)
    )
    dtype = problem.dtype
    table = roles(problem, schedule)
    registers = {role.name: role.registers for role in table}
    end = {role.name: sum(r.threads for r in table[: i + 1]) for i, role in enumerate(table)}  # past its last thread
    threads, first_load = end["load"], end["dk"]
    rows = T.GemmWarpPolicy.FullRow

    num_tokens = T.dynamic("num_tokens")
    num_slots = T.dynamic("num_slots")
    num_bounds = T.dynamic("num_bounds")

    @T.macro
    def run_products(chunks, scale, k_s, q_s, e_s, do_s, z_s, dp_s, w_s, gates, sums, tile_full, tile_free,
                     dp_full, dp_free, w_full, gates_full, sums_full):  # fmt: skip
        decay = T.alloc_local((C * C // 128,), "float32")  # Γ, as accumulators
        overlap = T.alloc_fragment((C, C), "float32")  # K Kᵀ
        x = T.alloc_fragment((C, C), "float32")  # Q Kᵀ, then X
        d1 = T.alloc_fragment((C, C), "float32")
        d2 = T.alloc_fragment((C, C), "float32")
        for chunk in T.serial(chunks[3 * SLOTS]):
            kq = chunk % KQ
            T.barrier_wait(tile_full[first_kq + kq], (chunk // KQ) % 2)
            for r in T.serial(GROUP):
                i = chunk * GROUP + r
                ee, do, head = i % ES, i % DO, i % HEAD_STAGES
                T.call_extern("handle", "qla::forget", x.data)
                T.wgmma_gemm(q_s[kq, :, :], k_s[kq, :, :], x, transpose_B=True, clear_accum=True, policy=rows)
                T.barrier_wait(gates_full[head], (i // HEAD_STAGES) % 2)
                T.call_extern(
                    "handle", "qla::decay_factors", decay.data, T.access_ptr(gates[head, Gate.LOG_GAMMA, 0], "r")
                )
                T.barrier_wait(tile_full[first_e + ee], (i // ES) % 2)
                T.barrier_wait(tile_full[first_do + do], (i // DO) % 2)
                T.call_extern("handle", "qla::forget", d1.data)
                T.wgmma_gemm(do_s[do, :, :], e_s[ee, :, :], d1, transpose_B=True, clear_accum=True, policy=rows)
                T.barrier_wait(tile_full[z_tile], i % 2)
                T.call_extern("handle", "qla::forget", d2.data)
                T.wgmma_gemm(z_s[0, :, :], e_s[ee, :, :], d2, transpose_B=True, clear_accum=True, policy=rows)
                T.barrier_wait(dp_free[0], (i + 1) % 2)
                T.wait_wgmma(1)
                T.barrier_arrive(tile_free[first_do + do])
                T.call_extern(
                    "handle", "qla::store_score_gradient", x.data, d1.data, decay.data,
                    T.access_ptr(gates[head, Gate.BETA, 0], "r"), scale, T.access_ptr(dp_s[0, 0], "w"),
                )  # fmt: skip
                T.fence_proxy_async()
                T.barrier_arrive(dp_full[0])
                T.call_extern("handle", "qla::forget", overlap.data)
                T.wgmma_gemm(k_s[kq, :, :], k_s[kq, :, :], overlap, transpose_B=True, clear_accum=True, policy=rows)
                T.wait_wgmma(0)
                T.barrier_arrive(tile_free[first_e + ee])
                T.barrier_arrive(tile_free[z_tile])
                T.call_extern(
                    "handle", "qla::store_key_gradient", x.data, overlap.data, d2.data, decay.data,
                    T.access_ptr(gates[head, Gate.BETA, 0], "r"), T.access_ptr(w_s[0, 0], "w"),
                )  # fmt: skip
                T.fence_proxy_async()
                T.barrier_arrive(w_full[0])
                T.call_extern(
                    "handle", "qla::sum_lower", x.data, T.access_ptr(gates[head, Gate.BETA, 0], "r"),
                    T.access_ptr(sums[head, Sum.COLUMNS, 0], "w"), T.access_ptr(sums[head, Sum.DIAGONAL, 0], "w"),
                    T.access_ptr(sums[head, Sum.ROWS, 0], "w"),
                )  # fmt: skip
                T.barrier_arrive(sums_full[head])
            T.barrier_arrive(tile_free[first_kq + kq])

    @T.macro
    def add_state_product(gradient, of_tokens, state, product, factor, dots, tile, stage):
        """Adds [C, DV] times a transposed state [DV, DK], rows scaled, and its rows' dots with the tile's.

        By halves of 64 columns, one after the other: the other warp groups' products run meanwhile.  The caller forgets
        `product` once a head, not before each half: ptxas would give each its own registers, start it while the dots of
        the one before are still to be summed, and run out of registers.
        """
        for half in T.unroll(DK // 64):
            T.wgmma_gemm(of_tokens, state[:, half * 64 : half * 64 + 64], product, clear_accum=True, policy=rows)
            T.wait_wgmma(0)
            T.call_extern(
                "handle", "qla::add_scaled_rows", gradient.data, product.data, factor.data,
                T.access_ptr(tile[stage, 0, 0], "r"), half * 64, dots.data,
            )  # fmt: skip

    @T.macro
    def run_dq(chunks, key_head, dq, k_s, q_s, do_s, s_s, dp_s, gates, sums, tile_full, tile_free,
               dp_full, dp_free, gates_full, sums_full):  # fmt: skip
        gradient = T.alloc_fragment((C, DK), "float32")
        product = T.alloc_fragment((C, 64), "float32")
        factor = T.alloc_local((2,), "float32")  # scale γ of this thread's rows
        dots = T.alloc_local((2,), "float32")
        for chunk in T.serial(chunks[3 * SLOTS]):
            kq = chunk % KQ
            T.barrier_wait(tile_full[first_kq + kq], (chunk // KQ) % 2)
            T.clear(gradient)
            for r in T.serial(GROUP):
                i = chunk * GROUP + r
                do, head = i % DO, i % HEAD_STAGES
                T.barrier_wait(tile_full[first_do + do], (i // DO) % 2)
                T.barrier_wait(tile_full[s_tile], i % 2)
                T.barrier_wait(gates_full[head], (i // HEAD_STAGES) % 2)
                T.call_extern(
                    "handle", "qla::load_row_factors", factor.data, T.access_ptr(gates[head, Gate.GAMMA_Q, 0], "r")
                )
                T.clear(dots)
                T.call_extern("handle", "qla::forget", product.data)
                add_state_product(gradient, do_s[do, :, :], s_s, product, factor, dots, q_s, kq)
                T.barrier_arrive(tile_free[first_do + do])
                T.barrier_arrive(tile_free[s_tile])
                T.call_extern(
                    "handle", "qla::write_dots", dots.data, T.access_ptr(gates[head, Gate.GAMMA_Q, 0], "r"),
                    T.access_ptr(sums[head, Sum.QUERY_DOTS, 0], "w"),
                )  # fmt: skip
                T.barrier_wait(dp_full[0], i % 2)
                T.wgmma_gemm(dp_s, k_s[kq, :, :], gradient, clear_accum=False, policy=rows)
                T.wait_wgmma(0)
                T.barrier_arrive(dp_free[0])
                T.barrier_arrive(sums_full[head])
            T.barrier_arrive(tile_free[first_kq + kq])
            T.call_extern(
                "handle", f"qla::store_gradient<{DK}>", gradient.data,
                T.access_ptr(dq[chunks[chunk * 3 + 1], key_head, 0], "w"), H * DK, chunks[chunk * 3 + 2],
            )  # fmt: skip

    @T.macro
    def run_dk(chunks, key_head, dk, k_s, q_s, z_s, s_s, ds_s, e_s, dp_s, w_s, gates, sums, tile_full, tile_free,
               dp_full, dp_free, w_full, gates_full, sums_full):  # fmt: skip
        gradient = T.alloc_fragment((C, DK), "float32")
        product = T.alloc_fragment((C, 64), "float32")
        factor = T.alloc_local((2,), "float32")  # −γ, then β γ_C/γ of this thread's rows
        dots = T.alloc_local((2,), "float32")
        for chunk in T.serial(chunks[3 * SLOTS]):
            kq = chunk % KQ
            T.barrier_wait(tile_full[first_kq + kq], (chunk // KQ) % 2)
            T.clear(gradient)
            for r in T.serial(GROUP):
                i = chunk * GROUP + r
                ee, head = i % ES, i % HEAD_STAGES
                T.barrier_wait(tile_full[z_tile], i % 2)
                T.barrier_wait(tile_full[s_tile], i % 2)
                T.barrier_wait(gates_full[head], (i // HEAD_STAGES) % 2)
                T.call_extern(
                    "handle", "qla::load_row_factors", factor.data, T.access_ptr(gates[head, Gate.GAMMA, 0], "r")
                )
                for j in T.unroll(2):
                    factor[j] = -factor[j]
                T.clear(dots)
                T.call_extern("handle", "qla::forget", product.data)
                add_state_product(gradient, z_s[0, :, :], s_s, product, factor, dots, k_s, kq)
                T.barrier_arrive(tile_free[z_tile])
                T.barrier_arrive(tile_free[s_tile])
                T.call_extern(
                    "handle", "qla::write_dots", dots.data, T.access_ptr(gates[head, Gate.GAMMA, 0], "r"),
                    T.access_ptr(sums[head, Sum.RESIDUAL_DOTS, 0], "w"),
                )  # fmt: skip
                T.barrier_wait(tile_full[first_e + ee], (i // ES) % 2)
                T.barrier_wait(tile_full[ds_tile], i % 2)
                T.call_extern(
                    "handle", "qla::load_row_factors", factor.data, T.access_ptr(gates[head, Gate.TAIL_BETA, 0], "r")
                )
                T.clear(dots)
                add_state_product(gradient, e_s[ee, :, :], ds_s, product, factor, dots, k_s, kq)
                T.barrier_arrive(tile_free[first_e + ee])
                T.barrier_arrive(tile_free[ds_tile])
                T.call_extern(
                    "handle", "qla::write_dots", dots.data, T.access_ptr(gates[head, Gate.TAIL, 0], "r"),
                    T.access_ptr(sums[head, Sum.STATE_DOTS, 0], "w"),
                )  # fmt: skip
                T.barrier_wait(dp_full[0], i % 2)
                T.wgmma_gemm(dp_s, q_s[kq, :, :], gradient, transpose_A=True, clear_accum=False, policy=rows)
                T.barrier_wait(w_full[0], i % 2)
                T.wgmma_gemm(w_s, k_s[kq, :, :], gradient, clear_accum=False, policy=rows)
                T.wait_wgmma(0)
                T.barrier_arrive(dp_free[0])
                T.barrier_arrive(sums_full[head])
            T.barrier_arrive(tile_free[first_kq + kq])
            T.call_extern(
                "handle", f"qla::store_gradient<{DK}>", gradient.data,
                T.access_ptr(dk[chunks[chunk * 3 + 1], key_head, 0], "w"), H * DK, chunks[chunk * 3 + 2],
            )  # fmt: skip

    @T.macro
    def bring_rows(source, token, valid, head, tile, stage, place, cleared, tile_full):
        """A tile of tokens; in a partial chunk its rows past the end are cleared when it has come."""
        T.tma_copy(
            source[token : token + C, head, :], tile[stage, :, :],
            barrier=tile_full[T.if_then_else(valid < C, partial, place)],
        )  # fmt: skip
        if valid < C:
            T.barrier_arrive(tile_full[partial])
            T.barrier_wait(tile_full[partial], cleared[0] % 2)
            cleared[0] = cleared[0] + 1
            T.call_extern(
                "handle", "qla::clear_rows_by_warp", T.access_ptr(tile[stage, 0, 0], "rw"), tile.shape[2], valid
            )
            T.fence_proxy_async()
        T.barrier_arrive(tile_full[place])

    @T.macro
    def run_load(chunks, key_head, q, k, states, effects, dstates, dv, do, k_s, q_s, e_s, do_s, z_s, s_s, ds_s,
                 tile_full, tile_free):  # fmt: skip
        cleared = T.alloc_local((1,), "int32")  # tiles of partial chunks so far
        cleared[0] = 0
        for chunk in T.serial(chunks[3 * SLOTS]):
            slot, token, valid = chunks[chunk * 3], chunks[chunk * 3 + 1], chunks[chunk * 3 + 2]
            kq = first_kq + chunk % KQ
            T.barrier_wait(tile_free[kq], (chunk // KQ + 1) % 2)
            bring_rows(k, token, valid, key_head, k_s, chunk % KQ, kq, cleared, tile_full)
            bring_rows(q, token, valid, key_head, q_s, chunk % KQ, kq, cleared, tile_full)
            for r in T.serial(GROUP):
                i, head = chunk * GROUP + r, key_head * GROUP + r
                ee, dd = first_e + i % ES, first_do + i % DO
                T.barrier_wait(tile_free[ee], (i // ES + 1) % 2)
                bring_rows(effects, token, valid, head, e_s, i % ES, ee, cleared, tile_full)
                T.barrier_wait(tile_free[dd], (i // DO + 1) % 2)
                bring_rows(do, token, valid, head, do_s, i % DO, dd, cleared, tile_full)
                T.barrier_wait(tile_free[s_tile], (i + 1) % 2)
                T.tma_copy(states[slot, head, :, :], s_s, barrier=tile_full[s_tile])
                T.barrier_arrive(tile_full[s_tile])
                T.barrier_wait(tile_free[z_tile], (i + 1) % 2)
                bring_rows(dv, token, valid, head, z_s, 0, z_tile, cleared, tile_full)
                T.barrier_wait(tile_free[ds_tile], (i + 1) % 2)
                T.tma_copy(dstates[slot, head, :, :], ds_s, barrier=tile_full[ds_tile])
                T.barrier_arrive(tile_full[ds_tile])

    @T.macro
    def write_gates(chunks, i, key_head, beta, log_gates, scale, gates, gates_full):
        entry, head = i // GROUP * 3, key_head * GROUP + i % GROUP
        T.call_extern(
            "handle", "qla::write_head_gates", T.access_ptr(log_gates[chunks[entry], head, 0], "r"),
            T.access_ptr(beta[chunks[entry + 1], head], "r"), HV, chunks[entry + 2], scale,
            T.access_ptr(gates[i % HEAD_STAGES, 0, 0], "w"),
        )  # fmt: skip
        T.barrier_arrive(gates_full[i % HEAD_STAGES])

    @T.macro
    def run_gates(chunks, key_head, beta, log_gates, dbeta, dg, scale, gates, sums, gates_full, sums_full):
        if chunks[3 * SLOTS] > 0:
            write_gates(chunks, 0, key_head, beta, log_gates, scale, gates, gates_full)
        for i in T.serial(chunks[3 * SLOTS] * GROUP):
            if i + 1 < chunks[3 * SLOTS] * GROUP:
                write_gates(chunks, i + 1, key_head, beta, log_gates, scale, gates, gates_full)
            entry, head = i // GROUP * 3, key_head * GROUP + i % GROUP
            T.barrier_wait(sums_full[i % HEAD_STAGES], (i // HEAD_STAGES) % 2)
            T.call_extern(
                "handle", "qla::write_gate_gradients", T.access_ptr(sums[i % HEAD_STAGES, 0, 0], "r"),
                T.access_ptr(gates[i % HEAD_STAGES, 0, 0], "r"), T.access_ptr(dbeta[chunks[entry + 1], head], "w"),
                T.access_ptr(dg[chunks[entry + 1], head], "w"), HV, chunks[entry + 2],
            )  # fmt: skip

    @T.macro
    def run_dots(chunks, s_s, ds_s, sums, tile_full, tile_free, gates_full, sums_full):
        for i in T.serial(chunks[3 * SLOTS] * GROUP):
            head = i % HEAD_STAGES
            T.barrier_wait(gates_full[head], (i // HEAD_STAGES) % 2)  # the sums of two heads before have been read
            T.barrier_wait(tile_full[s_tile], i % 2)
            T.barrier_wait(tile_full[ds_tile], i % 2)
            T.call_extern(
                "handle", f"qla::dot_tiles<{DV * DK}>", T.access_ptr(s_s[0, 0], "r"), T.access_ptr(ds_s[0, 0], "r"),
                T.access_ptr(sums[head, Sum.STATE_PRODUCT, 0], "w"),
            )  # fmt: skip
            T.barrier_arrive(tile_free[s_tile])
            T.barrier_arrive(tile_free[ds_tile])
            T.barrier_arrive(sums_full[head])

    @T.prim_func
    def backward_grad(
        q: T.Tensor((num_tokens, H, DK), dtype),
        k: T.Tensor((num_tokens, H, DK), dtype),
        beta: T.Tensor((num_tokens, HV), "float32"),
        log_gates: T.Tensor((num_slots, HV, C), "float32"),
        bounds: T.Tensor((num_bounds,), "int32"),
        states: T.Tensor((num_slots, HV, DV, DK), dtype),
        effects: T.Tensor((num_tokens, HV, DV), dtype),
        dstates: T.Tensor((num_slots, HV, DV, DK), dtype),
        dv: T.Tensor((num_tokens, HV, DV), dtype),
        do: T.Tensor((num_tokens, HV, DV), dtype),
        dq: T.Tensor((num_tokens, H, DK), dtype),
        dk: T.Tensor((num_tokens, H, DK), dtype),
        dbeta: T.Tensor((num_tokens, HV), "float32"),
        dg: T.Tensor((num_tokens, HV), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(
            T.ceildiv(num_slots, SLOTS) * H, threads=threads, prelude=FRAGMENTS_CUDA + GRADIENTS_CUDA
        ) as block:
            k_s = T.alloc_shared((KQ, C, DK), dtype)
            q_s = T.alloc_shared((KQ, C, DK), dtype)
            e_s = T.alloc_shared((ES, C, DV), dtype)
            do_s = T.alloc_shared((DO, C, DV), dtype)
            z_s = T.alloc_shared((1, C, DV), dtype)
            s_s = T.alloc_shared((DV, DK), dtype)
            ds_s = T.alloc_shared((DV, DK), dtype)
            dp_s = T.alloc_shared((C, C), dtype)
            w_s = T.alloc_shared((C, C), dtype)
            gates = T.alloc_shared((HEAD_STAGES, Gate.COUNT, C), "float32", scope="shared")
            sums = T.alloc_shared((HEAD_STAGES, Sum.COUNT, C), "float32", scope="shared")
            chunks = T.alloc_shared((3 * SLOTS + 1,), "int32", scope="shared")  # slot, first token, tokens; their count
            layout = tilelang.layout
            tiles = (k_s, q_s, e_s, do_s, z_s, s_s, ds_s, dp_s, w_s)
            T.annotate_layout({t: layout.make_full_bank_swizzled_layout(t) for t in tiles})
            tile_full = T.alloc_barrier(arrive_count=[64] * KQ + [32] * (partial + 1 - KQ))  # K and Q one by one
            tile_free = T.alloc_barrier(arrive_count=[384] * KQ + [256] * (ES + DO) + [256, 320, 192])
            dp_full = T.alloc_barrier(arrive_count=[128])
            dp_free = T.alloc_barrier(arrive_count=[256])  # and W, which dk reads at the same time
            w_full = T.alloc_barrier(arrive_count=[128])
            gates_full = T.alloc_barrier(arrive_count=[32] * HEAD_STAGES)
            sums_full = T.alloc_barrier(arrive_count=[448] * HEAD_STAGES)

            T.call_extern(
                "handle", f"qla::find_chunks<{SLOTS}>", T.access_ptr(bounds[0], "r"), num_bounds - 1,
                block // H * SLOTS, num_slots, T.access_ptr(chunks[0], "w"),
            )  # fmt: skip
            T.pdl_sync()
            key_head = block % H
            tx = T.get_thread_binding()
            if tx < end["products"]:
                T.set_max_nreg(registers["products"], 1)
                run_products(chunks, scale, k_s, q_s, e_s, do_s, z_s, dp_s, w_s, gates, sums, tile_full, tile_free,
                             dp_full, dp_free, w_full, gates_full, sums_full)  # fmt: skip
            elif tx < end["dq"]:
                T.set_max_nreg(registers["dq"], 1)
                run_dq(chunks, key_head, dq, k_s, q_s, do_s, s_s, dp_s, gates, sums, tile_full, tile_free,
                       dp_full, dp_free, gates_full, sums_full)  # fmt: skip
            elif tx < end["dk"]:
                T.set_max_nreg(registers["dk"], 1)
                run_dk(chunks, key_head, dk, k_s, q_s, z_s, s_s, ds_s, e_s, dp_s, w_s, gates, sums, tile_full,
                       tile_free, dp_full, dp_free, w_full, gates_full, sums_full)  # fmt: skip
            else:
                T.set_max_nreg(registers["load"], 0)
                if tx < first_load + 32:
                    run_load(chunks, key_head, q, k, states, effects, dstates, dv, do, k_s, q_s, e_s, do_s, z_s,
                             s_s, ds_s, tile_full, tile_free)  # fmt: skip
                elif tx < first_load + 64:
                    run_gates(chunks, key_head, beta, log_gates, dbeta, dg, scale, gates, sums, gates_full,
                              sums_full)  # fmt: skip
                else:
                    run_dots(chunks, s_s, ds_s, sums, tile_full, tile_free, gates_full, sums_full)

    return backward_grad


TEMPLATE = Template(
    kernel="backward_grad",
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
    sources=("backward_grad_sm90.py", "gradients_sm90.py", "fragments_sm90.py"),
    unsupported=unsupported,
    adapt=adapt,
    pass_configs={"TL_DISABLE_THREAD_STORAGE_SYNC": True, "TL_ENABLE_FAST_MATH": True},
)
