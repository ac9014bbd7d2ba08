"""Activations of a call's inputs in one launch: L2-normalised q and k, β by a sigmoid, g from its logits, plain casts.

    q, k ← x / sqrt(Σ x² + 1e-6)        β ← sigmoid(β), times 2 on request        g ← −exp(A_log) softplus(g + dt_bias)

One CTA per ``rows`` rows of q and of k (a row is one head of one token) and the gates that belong to them.  Memory
bounds it: the lanes of a row load 16 bytes each, sum the squares by shuffles, and store what they hold in registers.
Flags choose what is done at run time; tensors of what is not done are not touched.
"""

from qla_jit.arch import ALL_ARCHS
from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work

NAME = "input_activation"
L2NORM_EPS = 1e-6  # under the square root, as FLA has it
SOFTPLUS_LINEAR = 20.0  # softplus(x) is x above it, as in PyTorch
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

VECTOR = 8  # elements of 16 bytes
MAX_VECTORS = 8  # of q, and as many of k, that a thread may hold

PARAMETERS = (
    Parameter("rows", (8, 16, 32, 64, 128), 32, "rows of q and of k per CTA"),
    Parameter("threads", (64, 128, 256), 128, "threads per CTA"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("rows", schedule["threads"] // 32, 128, "rows of q and k, and their gates"),)


def _vectors_per_thread(problem: Problem, schedule: Schedule, arch) -> str | None:
    vectors = schedule["rows"] * problem.head_dim_k / (VECTOR * schedule["threads"])
    if not 1 <= vectors <= MAX_VECTORS:
        return f"{vectors:g} vectors of 16 bytes per thread, of 1 to {MAX_VECTORS}"
    return None


RULES = (Rule("threads_hold_whole_vectors", _vectors_per_thread),)


def adapt(problem: Problem, schedule: Schedule) -> Schedule:
    """As many bytes in flight for short heads as for long ones."""
    return schedule.replace(rows=32 * 128 // problem.head_dim_k)


def buffers(problem: Problem, schedule: Schedule) -> tuple[SharedBuffer, ...]:
    return ()


def work(problem: Problem, schedule: Schedule) -> Work:
    """A value head's share of q and k, and its own gates."""
    c = problem.chunk_size
    rows = 2 * 2 * c * problem.head_dim_k // problem.group_size
    gates = c * (ITEMSIZE[problem.gate_dtype] + ITEMSIZE[problem.beta_dtype])
    return Work(flops=0, bytes_read=rows + gates, bytes_written=rows + 2 * 4 * c)


def prim_func(problem: Problem, schedule: Schedule):
    """The TileLang kernel; arguments are listed in `qla_jit.launch`."""
    import tilelang.language as T  # no postponed annotations in this module: T.prim_func evaluates them

    DK, H, HV, GROUP = problem.head_dim_k, problem.num_heads, problem.num_value_heads, problem.group_size
    ROWS = schedule["rows"]
    dtype = problem.dtype
    num_tokens = T.dynamic("num_tokens")

    def parameter(wide, half, head, mode):
        narrow = T.if_then_else(mode == 2, T.cast(half[head], "float32"), 0.0)
        return T.if_then_else(mode == 1, wide[head], narrow)

    @T.macro
    def load(x, x_frag, row0, num_rows):
        for r, c in T.Parallel(ROWS, DK):  # rows past the end repeat the last one
            row = T.min(row0 + r, num_rows - 1)
            x_frag[r, c] = x[row // H, row % H, c]

    @T.macro
    def normalize_and_store(x_frag, x_out, row0, num_rows):
        wide = T.alloc_fragment((ROWS, DK), "float32")
        squares = T.alloc_fragment((ROWS, DK), "float32")
        inverse_norm = T.alloc_fragment((ROWS,), "float32")
        for r, c in T.Parallel(ROWS, DK):
            wide[r, c] = T.cast(x_frag[r, c], "float32")
            squares[r, c] = wide[r, c] * wide[r, c]
        T.reduce_sum(squares, inverse_norm, dim=1)
        for r in T.Parallel(ROWS):
            inverse_norm[r] = T.rsqrt(inverse_norm[r] + L2NORM_EPS)
        for r, c in T.Parallel(ROWS, DK):
            x_frag[r, c] = T.cast(wide[r, c] * inverse_norm[r], dtype)
        for r, c in T.Parallel(ROWS, DK):
            if row0 + r < num_rows:
                x_out[(row0 + r) // H, (row0 + r) % H, c] = x_frag[r, c]

    @T.prim_func
    def input_activation(
        q: T.Tensor((num_tokens, H, DK), dtype),
        k: T.Tensor((num_tokens, H, DK), dtype),
        g: T.Tensor((num_tokens, HV), problem.gate_dtype),
        beta: T.Tensor((num_tokens, HV), problem.beta_dtype),
        a_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        a_log_half: T.Tensor((HV,), dtype),
        dt_bias_half: T.Tensor((HV,), dtype),
        q_out: T.Tensor((num_tokens, H, DK), dtype),
        k_out: T.Tensor((num_tokens, H, DK), dtype),
        g_out: T.Tensor((num_tokens, HV), "float32"),
        beta_out: T.Tensor((num_tokens, HV), "float32"),
        qk_mode: T.int32,
        g_mode: T.int32,
        beta_mode: T.int32,
        a_log_mode: T.int32,
        dt_bias_mode: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens * H, ROWS), threads=schedule["threads"]) as block:
            q_frag = T.alloc_fragment((ROWS, DK), dtype)
            k_frag = T.alloc_fragment((ROWS, DK), dtype)
            row0 = block * ROWS
            num_rows = num_tokens * H
            if qk_mode != 0:
                load(q, q_frag, row0, num_rows)
                load(k, k_frag, row0, num_rows)

            # β ← m σ(β)
            if beta_mode != 0:
                for r, j in T.Parallel(ROWS, GROUP):
                    if row0 + r < num_rows:
                        token, head = (row0 + r) // H, (row0 + r) % H * GROUP + j
                        b = T.cast(beta[token, head], "float32")
                        s = T.cast(beta_mode - 1, "float32") / (1.0 + T.exp(-b))
                        beta_out[token, head] = T.if_then_else(beta_mode == 1, b, s)

            # g ← −exp(A_log) softplus(g + dt_bias)
            if g_mode != 0:
                for r, j in T.Parallel(ROWS, GROUP):
                    if row0 + r < num_rows:
                        token, head = (row0 + r) // H, (row0 + r) % H * GROUP + j
                        x = T.cast(g[token, head], "float32")
                        if g_mode == 1:
                            g_out[token, head] = x
                        else:
                            rate = T.exp(parameter(a_log, a_log_half, head, a_log_mode))
                            shifted = x + parameter(dt_bias, dt_bias_half, head, dt_bias_mode)
                            softplus = T.if_then_else(shifted > SOFTPLUS_LINEAR, shifted, T.log1p(T.exp(shifted)))
                            g_out[token, head] = -rate * softplus

            # x ← x / sqrt(Σ x² + 1e-6)
            if qk_mode != 0:
                normalize_and_store(q_frag, q_out, row0, num_rows)
                normalize_and_store(k_frag, k_out, row0, num_rows)

    return input_activation


TEMPLATE = Template(
    kernel="input_activation",
    name=NAME,
    archs=ALL_ARCHS,
    preferred=ALL_ARCHS,
    parameters=PARAMETERS,
    rules=RULES,
    roles=roles,
    buffers=buffers,
    work=work,
    prim_func=prim_func,
    sources=("input_activation.py",),
    adapt=adapt,
    pass_configs={"TL_DISABLE_TMA_LOWER": True, "TL_DISABLE_WARP_SPECIALIZED": True},
)
