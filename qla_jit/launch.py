"""The argument lists of the kernels, and the per-chunk workspace that passes between them.

Every template of a kernel takes these arguments in this order; tokens of all sequences are laid end to end:

| kernel          | inputs                                              | outputs                                    |
| --------------- | --------------------------------------------------- | ------------------------------------------ |
| `kkt_inverse`   | k [T, H, K], beta, g [T, HV], bounds [N + 1]        | a [slots, HV, C, C]                        |
|                 |                                                     | log_gates [slots, HV, C]                   |
| `fused_forward` | q, k [T, H, K], v [T, HV, V], a, log_gates, bounds, | final [·, HV, K, V], o [T, HV, V]          |
|                 | initial [·, HV, K, V]                               |                                            |

a is lower triangular; its upper right quarter (r < C/2 ≤ c) is never read and may hold anything.
bounds: cumulative lengths, int32.  g, beta, log_gates: fp32.  `fused_forward` ends with scale (float) and the flags
has_initial, has_final; where a flag is 0 its state tensor is not touched and may have any number of sequences.
"""

from __future__ import annotations

import torch

from .config import Problem
from .ragged import num_slots

ARGUMENTS = {
    "kkt_inverse": ("k", "beta", "g", "bounds", "a", "log_gates"),
    "fused_forward": (
        "q", "k", "v", "a", "log_gates", "bounds", "state_rows", "checkpoint_rows", "initial", "final", "checkpoints", "o",
        "scale", "has_initial", "has_final", "chunks_per_checkpoint",
    ),
}
OUTPUTS = {"kkt_inverse": ("a", "log_gates"), "fused_forward": ("o", "final")}


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
