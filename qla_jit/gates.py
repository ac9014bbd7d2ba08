"""What gates say about a model: how many of its value heads forget soon enough for windows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .device_indices import is_capturing
from .errors import InputError
from .segments import DEFAULT_WINDOW, EXACT

#: Tokens within which a head must forget: the shortest segment at K = V = 128, so that its windows hold in any cut.
FORGETS_WITHIN = 512


def window_share_of(g: torch.Tensor, window: str | float = DEFAULT_WINDOW) -> float:
    """The share of value heads that forget, as the argument ``window_share`` of the operator takes it.

    g: ``[B, T, HV]``, log decays of some tokens that are like those to come, for example of one batch of a layer.
    window: as of the operator; with "exact" no head has a window.  A head counts if its gates, at the pace of their
    mean, reach the window's tolerance within 512 tokens.

    Copies one number from the device and waits for it: ask once for a layer, not in every step, or let a `WindowShare`
    ask.  Raises InputError for another shape, for no tokens, and for a tolerance outside (0, 1).
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
    return _share(g, window).item()


def _share(g: torch.Tensor, window: float) -> torch.Tensor:
    """What `window_share_of` answers, on g's device."""
    pace = g.detach().float().mean((0, 1))
    return (pace * FORGETS_WITHIN <= math.log(window)).float().mean()


class WindowShare:
    """``window_share`` of one layer, learned from its own calls: pass the same object in each of them.

    The first call, and then one of ``every``, has its gates looked at on the device, without waiting: what they say
    counts as soon as it has arrived, for the calls of a later step.  Until then the operator expects what it does
    without it.  Calls that are captured into a CUDA graph or traced by `torch.compile` use what is known and learn
    nothing.  As batches are split by it, equal calls before and after it has learned may differ by rounding, and so may
    ranks.  Not for several threads at once.

    value: the share known, None before the first; it moves by at least 1/16 or not at all, so that plans stay.
    """

    #: A smaller change of the share is not worth another plan.
    LEAST_CHANGE = 1 / 16
    #: Tokens that are looked at, at most: of the first sequences.
    MOST_TOKENS = 8192

    def __init__(self, every: int = 256):
        """Raises InputError unless every >= 1."""
        if every < 1:
            raise InputError(f"`every >= 1` must hold, but got {every}; it is a number of calls.")
        self.value: float | None = None
        self._every = every
        self._calls = 0
        self._host: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None  # set while a share is on its way to ``_host``

    def known(self) -> float | None:
        """The share to plan a call by: ``value``, after what has arrived."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
            self._learn(self._host.item())
        return self.value

    def look(self, g: torch.Tensor, window: str | float, decays: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Have the gates of a call looked at, if it is its turn.  g: ``[B, T, HV]``.  decays: log decays of such."""
        if window == EXACT or g.numel() == 0 or is_capturing(g.device):
            return
        if self._calls % self._every == 0 and self._arrived is None:
            self._send(_share(decays(g[:, : self.MOST_TOKENS].detach()), window))
        self._calls += 1

    def _send(self, share: torch.Tensor) -> None:
        if not share.is_cuda:
            self._learn(share.item())
            return
        if self._host is None:
            self._host = torch.empty((), dtype=share.dtype, pin_memory=True)
        self._host.copy_(share, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(share.device))  # not that of torch's current card

    def _learn(self, share: float) -> None:
        if self.value is None or abs(share - self.value) >= self.LEAST_CHANGE:
            self.value = share
