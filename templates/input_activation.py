"""Activations of a call's inputs in one launch: L2-normalised q and k, β by a sigmoid, g from its logits, plain casts.

    q, k ← x / sqrt(Σ x² + 1e-6)        β ← sigmoid(β), times 2 on request        g ← −exp(A_log) softplus(g + dt_bias)

One CTA per ``rows`` rows of q and of k (a row is one head of one token) and the gates that belong to them.  Memory
bounds it: the lanes of a row load 16 bytes each, sum the squares by shuffles, and store what they hold in registers.
Flags choose what is done at run time; tensors of what is not done are not touched.
"""

from qla_jit.arch import ALL_ARCHS
from qla_jit.config import Problem
from qla_jit.schedule import Parameter, Role, Schedule
from qla_jit.template import SharedBuffer, Template, Work

NAME = "input_activation"
L2NORM_EPS = 1e-6  # under the square root, as FLA has it
SOFTPLUS_LINEAR = 20.0  # softplus(x) is x above it, as in PyTorch
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

PARAMETERS = (
    Parameter("rows", (8, 16, 32, 64), 32, "rows of q and of k per CTA"),
    Parameter("threads", (64, 128, 256), 128, "threads per CTA"),
)


def roles(problem: Problem, schedule: Schedule) -> tuple[Role, ...]:
    return (Role("rows", schedule["threads"] // 32, 128, "rows of q and k, and their gates"),)


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
    dtype, gate_dtype, beta_dtype = problem.dtype, problem.gate_dtype, problem.beta_dtype
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def normalise(x, x_out, row0, num_rows):
        rounded = T.alloc_fragment((ROWS, DK), dtype)
        wide = T.alloc_fragment((ROWS, DK), "float32")
        squares = T.alloc_fragment((ROWS, DK), "float32")
        norm = T.alloc_fragment((ROWS,), "float32")
        for r, c in T.Parallel(ROWS, DK):  # rows past the end repeat the last one
            row = T.min(row0 + r, num_rows - 1)
            rounded[r, c] = x[row // H, row % H, c]
        for r, c in T.Parallel(ROWS, DK):
            wide[r, c] = T.cast(rounded[r, c], "float32")
            squares[r, c] = wide[r, c] * wide[r, c]
        T.reduce_sum(squares, norm, dim=1)
        for r in T.Parallel(ROWS):
            norm[r] = T.rsqrt(norm[r] + L2NORM_EPS)
        for r, c in T.Parallel(ROWS, DK):
            rounded[r, c] = T.cast(wide[r, c] * norm[r], dtype)
        for r, c in T.Parallel(ROWS, DK):
            if row0 + r < num_rows:
                x_out[(row0 + r) // H, (row0 + r) % H, c] = rounded[r, c]

    @T.prim_func
    def input_activation(
        q: T.Tensor((num_tokens, H, DK), dtype),
        k: T.Tensor((num_tokens, H, DK), dtype),
        g: T.Tensor((num_tokens, HV), gate_dtype),
        beta: T.Tensor((num_tokens, HV), beta_dtype),
        a_log: T.Tensor((HV,), "float32"),
        dt_bias: T.Tensor((HV,), "float32"),
        q_out: T.Tensor((num_tokens, H, DK), dtype),
        k_out: T.Tensor((num_tokens, H, DK), dtype),
        g_out: T.Tensor((num_tokens, HV), "float32"),
        beta_out: T.Tensor((num_tokens, HV), "float32"),
        normalise_qk: T.int32,
        g_mode: T.int32,
        beta_mode: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens * H, ROWS), threads=schedule["threads"]) as block:
            row0 = block * ROWS
            num_rows = num_tokens * H
            if normalise_qk != 0:
                normalise(q, q_out, row0, num_rows)
                normalise(k, k_out, row0, num_rows)
            if beta_mode != 0:
                for r, j in T.Parallel(ROWS, GROUP):
                    row = row0 + r
                    if row < num_rows:
                        x = T.cast(beta[row // H, row % H * GROUP + j], "float32")
                        beta_out[row // H, row % H * GROUP + j] = T.if_then_else(
                            beta_mode == 1, x, T.cast(beta_mode - 1, "float32") / (1.0 + T.exp(-x)))
            if g_mode != 0:
                for r, j in T.Parallel(ROWS, GROUP):
                    row = row0 + r
                    if row < num_rows:
                        x = T.cast(g[row // H, row % H * GROUP + j], "float32")
                        g_out[row // H, row % H * GROUP + j] = x

    return input_activation
