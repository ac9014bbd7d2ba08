"""A pool of states in plain PyTorch: sequence n owns row ``rows[n]``; a negative row means no state.

The kernels read and write pools by themselves; this is what CPU tensors run.
"""

from __future__ import annotations

import torch


def gather(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The states of the sequences, ``[N, ...]``; zero where the row is negative."""
    states = pool.index_select(0, rows.clamp(min=0))
    # A select, not a product: row 0, which stands in for no row, may hold NaN.
    return states.where((rows >= 0)[:, None, None, None], torch.zeros((), dtype=pool.dtype, device=pool.device))


def scatter(pool: torch.Tensor, rows: torch.Tensor, states: torch.Tensor) -> None:
    """Write the states back to their rows, in place; those of negative rows nowhere.  Reads ``rows`` on the host."""
    owned = rows >= 0
    pool.index_copy_(0, rows[owned].long(), states[owned])
