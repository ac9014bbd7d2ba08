"""What gates say about a model: how many of its value heads forget soon enough for windows."""

from __future__ import annotations

import math

import torch

from .errors import InputError
from .segments import DEFAULT_WINDOW, EXACT

#: Tokens within which a head must forget: the shortest segment at K = V = 128, so that its windows hold in any cut.
FORGETS_WITHIN = 512


def window_share_of(g: torch.Tensor, window: str | float = DEFAULT_WINDOW) -> float:
    """The share of value heads that forget, as the argument ``window_share`` of the operator takes it.

    g: ``[B, T, HV]``, log decays of some tokens that are like those to come, for example of one batch of a layer.
    window: as of the operator; with "exact" no head has a window.  A head counts if its gates, at the pace of their
    mean, reach the window's tolerance within 512 tokens.

    Copies one number from the device and waits for it: ask once for a layer, not in every step.  Raises InputError for
    another shape, for no tokens, and for a tolerance outside (0, 1).
    """
    if g.dim() != 3 or g.shape[0] * g.shape[1] == 0:
        raise InputError(
            f"`g` must be [B, T, HV] with at least one token, but got {tuple(g.shape)}; pass its log decays."
        )
    if window == EXACT:
        return 0.0
    if not 0.0 < window < 1.0:
        raise InputError(
            f'`window` must be "exact" or in (0, 1), but got {window!r}; pass the window that the operator is given.'
        )
    pace = g.detach().float().mean((0, 1))
    return (pace * FORGETS_WITHIN <= math.log(window)).float().mean().item()
