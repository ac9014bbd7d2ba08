"""The argument lists of the kernels, and the per-chunk workspace that passes between them.

Every template of a kernel takes these arguments in this order; tokens of all sequences are laid end to end:

| kernel          | inputs                                              | outputs                                    |
| --------------- | --------------------------------------------------- | ------------------------------------------ |
| `input_…`       | q, k [T, H, K], g, beta [T, HV], a_log, dt_bias,    | q_out, k_out [T, H, K]                     |
| `…activation`   | a_log_half, dt_bias_half [HV]                       | g_out, beta_out [T, HV]                    |
| `kkt_inverse`   | k [T, H, K], beta, g [T, HV], bounds [N + 1]        | a [slots, HV, C, C]                        |
|                 |                                                     | log_gates [slots, HV, C]                   |
| `fused_forward` | q, k [T, H, K], v [T, HV, V], a, log_gates, bounds, | final [·, HV, K, V], o [T, HV, V]          |
|                 | initial [·, HV, K, V]                               |                                            |

a is lower triangular; its upper right quarter (r < C/2 ≤ c) is never read and may hold anything.
bounds: cumulative lengths, int32.  g, beta, log_gates: fp32.  `fused_forward` ends with scale (float) and the flags
has_initial, has_final; where a flag is 0 its state tensor is not touched and may have any number of sequences.

`input_activation` ends with five ints; tensors that they do not ask for are not touched.  qk_mode: 1 L2-normalises q
and k.  g_mode: 1 casts g to fp32, 2 makes it −exp(A_log) softplus(g + dt_bias).  beta_mode: 1 casts beta to fp32,
2 takes its sigmoid, 3 twice that.  a_log_mode, dt_bias_mode: 1 reads the fp32 tensor, 2 the one in q's dtype; for
dt_bias, 0 adds nothing.
"""

from __future__ import annotations

import torch

from .config import Problem
from .ragged import num_slots

ARGUMENTS = {
    "input_activation": (
        "q", "k", "g", "beta", "a_log", "dt_bias", "a_log_half", "dt_bias_half", "q_out", "k_out", "g_out", "beta_out",
        "qk_mode", "g_mode", "beta_mode", "a_log_mode", "dt_bias_mode",
    ),
    "kkt_inverse": ("k", "beta", "g", "bounds", "a", "log_gates"),
    "fused_forward": (
        "q", "k", "v", "a", "log_gates", "bounds", "state_rows", "checkpoint_rows", "initial", "final", "checkpoints",
        "o", "scale", "has_initial", "has_final", "chunks_per_checkpoint",
    ),
    "segment_state": (
        "k", "v", "a", "log_gates", "turns", "state_rows", "initial", "starts", "decays", "o", "has_initial",
        "log_tolerance", "for_backward",
    ),
    "segment_correct": ("first_segments", "cut_sequences", "starts", "decays", "bounds", "segments", "o"),
    "segment_forward": (
        "q", "k", "v", "a", "log_gates", "bounds", "segments", "starts", "state_rows", "checkpoint_rows", "initial",
        "final", "checkpoints", "o", "scale", "has_initial", "has_final", "chunks_per_checkpoint",
    ),
    "recompute_state": (
        "k", "v", "a", "log_gates", "bounds", "initial", "states", "effects", "has_initial",
    ),
    "backward_state": (
        "q", "k", "do", "a", "log_gates", "bounds", "dfinal", "dinitial", "dstates", "dv", "scale", "has_dfinal",
        "has_dinitial",
    ),
    "backward_grad": (
        "q", "k", "beta", "log_gates", "bounds", "states", "effects", "dstates", "dv", "do", "dq", "dk", "dbeta", "dg",
        "scale",
    ),
    "segment_recompute": (
        "k", "v", "a", "log_gates", "bounds", "segments", "starts", "initial", "states", "effects", "has_initial",
    ),
    "segment_gradient": (
        "q", "k", "do", "a", "log_gates", "bounds", "segments", "turns", "dfinal", "ends", "dv", "scale", "has_dfinal",
        "log_tolerance",
    ),
    "segment_gradient_correct": (
        "first_segments", "cut_sequences", "ends", "decays", "bounds", "segments", "effects", "dv",
    ),
    "segment_backward": (
        "q", "k", "do", "a", "log_gates", "bounds", "segments", "ends", "dfinal", "dinitial", "dstates", "dv", "scale",
        "has_dfinal", "has_dinitial",
    ),
}  # fmt: skip
OUTPUTS = {
    "input_activation": ("q_out", "k_out", "g_out", "beta_out"),
    "kkt_inverse": ("a", "log_gates"),
    "fused_forward": ("o", "final"),
    "segment_state": ("starts", "decays", "o"),
    "segment_correct": ("o",),
    "segment_forward": ("o", "final"),
    "recompute_state": ("states", "effects"),
    "backward_state": ("dstates", "dv", "dinitial"),
    "backward_grad": ("dq", "dk", "dbeta", "dg"),
    "segment_recompute": ("states", "effects"),
    "segment_gradient": ("ends", "dv"),
    "segment_gradient_correct": ("dv",),
    "segment_backward": ("dstates", "dv", "dinitial"),
}


def without_upper_quarter(a: torch.Tensor) -> torch.Tensor:
    """A copy of ``a`` [..., C, C] with zeros where its content is unspecified."""
    half = a.shape[-1] // 2
    a = a.clone()
    a[..., :half, half:] = 0
    return a


def inverse_shape(problem: Problem, num_tokens: int, num_sequences: int) -> tuple[int, int, int, int]:
    """Shape of ``a`` for a batch: [slots, HV, C, C]."""
    c = problem.chunk_size
    return num_slots(num_tokens, num_sequences, c), problem.num_value_heads, c, c


def state_shape(problem: Problem, num_sequences: int) -> tuple[int, int, int, int]:
    """Shape of ``initial`` and ``final`` in the problem's layout."""
    dims = (problem.head_dim_k, problem.head_dim_v)
    return (num_sequences, problem.num_value_heads, *(dims[::-1] if problem.state_v_first else dims))


def torch_dtype(name: str) -> torch.dtype:
    """``torch.bfloat16`` for "bfloat16", and so on."""
    return getattr(torch, name)
