"""The backward of a batch whose sequences are cut into segments: what runs between `kkt_inverse` and `backward_grad`.

| kernel                     | leaves                                                                                |
| -------------------------- | ------------------------------------------------------------------------------------- |
| `segment_state`            | S* of segments, and D of those that either correction needs, in rows of `effects`     |
| `segment_correct`          | the states that segments start from, there                                            |
| `segment_gradient`         | dS* of segments, in rows of `dv`                                                      |
| `segment_gradient_correct` | the gradients of the states that leave segments, there                                |
| `segment_recompute`        | states before every chunk, and effects                                                |
| `segment_backward`         | gradients of the states that leave every chunk, of V and of initial states            |

The rows are those of `split`; each is overwritten by the segment that reads it, after it has (docs/splitting.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .config import BACKWARD
from .segments import Segments
from .split import SegmentTables, log_tolerance
from .workspace import Layout

KERNELS = BACKWARD.split


class SplitBackward:
    """`recompute_state` and `backward_state` by segments, for batches of one content, on torch's current stream."""

    def __init__(
        self,
        entries: Mapping[str, Callable[..., None]],
        segments: Segments,
        num_value_heads: int,
        window: str | float,
        device: torch.device,
    ):
        """entries: of `KERNELS`.  Copies the cut to the device and waits for it, so every stream may call this."""
        self.segments = segments
        self._entries = [entries[name] for name in KERNELS]
        self._log_tolerance = log_tolerance(window)
        self._tables = SegmentTables(segments, device)
        shape = len(segments), num_value_heads
        self.scratch: Layout = ((shape, torch.int32), (shape, torch.int32), (shape, torch.float32))

    def __call__(
        self, q, k, v, do, a, log_gates, bounds, sequence_rows, initial, dfinal, dinitial, states, effects, dstates,
        dv, scale, has_initial, has_dfinal, has_dinitial, starts, ends, decays,
    ) -> None:  # fmt: skip
        """Tensors as `launch` lists them for the two kernels that this stands for; sequence_rows: 0 … N − 1; starts,
        ends, decays: as in `self.scratch`.  What was cut and what was decided for it is read from tensors of torch's.
        """
        state, correct, gradient, gradient_correct, recompute, backward = self._entries
        tables = self._tables
        tables.use()
        table, turns, corrected = tables.segments, tables.turns, (tables.first_segments, tables.corrected)
        state(
            k, v, a, log_gates, turns, sequence_rows, initial, starts, decays, effects, has_initial,
            self._log_tolerance, 1,
        )  # fmt: skip
        if tables.needs_correction:
            correct(*corrected, starts, decays, bounds, table, effects)
        gradient(q, k, do, a, log_gates, bounds, table, turns, dfinal, ends, dv, scale, has_dfinal, self._log_tolerance)
        if tables.needs_correction:
            gradient_correct(*corrected, ends, decays, bounds, table, effects, dv)
        recompute(k, v, a, log_gates, bounds, table, starts, initial, states, effects, has_initial)
        backward(
            q, k, do, a, log_gates, bounds, table, ends, dfinal, dinitial, dstates, dv, scale, has_dfinal, has_dinitial
        )
