"""The forward of a batch whose sequences are cut into segments: three kernels in the place of `fused_forward`.

`segment_state` runs the segments that another follows, from the state at hand; `segment_correct` adds what came before
them; `segment_forward` then runs every segment from its right start (docs/splitting.md).  States pass between them in
rows of `o` that the forward writes last, so a split takes no memory but two numbers per segment and value head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from .config import SPLIT_KERNELS, Problem
from .device_indices import current_stream
from .segments import EXACT, Segments, cut, least_segment_chunks
from .templates.segments_sm90 import SEGMENT_FIELDS, TURN_FIELDS
from .workspace import Layout

_NEVER = -3.0e38  # log2 of a tolerance that no sum of gates reaches
_MARGIN = 1e-4  # of log2 of the tolerance: gates are summed in fp32


def log_tolerance(window: str | float) -> float:
    """What kernels compare sums of log2 gates with; a window is never shorter than the tolerance allows.

    window: "exact", or the largest factor, in (0, 1), by which the state before a window may still count.
    """
    return _NEVER if window == EXACT else math.log2(window) * (1.0 + _MARGIN)


class SegmentTables:
    """A cut as kernels read it, int32 on a card: table, turns, first segments, and sequences to correct.

    Complete before anyone sees it, so every stream may read it.  It may be dropped while a stream still reads it, so
    `use` tells torch's allocator of the stream; and a CUDA graph that was captured with it keeps it for good.
    """

    _captured: ClassVar[list[SegmentTables]] = []

    def __init__(self, segments: Segments, device: torch.device):
        rows, turns = ([x for row in table for x in row] for table in (segments.table(), segments.turn_table()))
        parts = (rows, turns, segments.firsts, segments.corrected_sequences())
        self._memory = torch.tensor([x for part in parts for x in part], dtype=torch.int32).to(device)
        table, turns, self.first_segments, self.corrected = self._memory.split([len(part) for part in parts])
        self.segments, self.turns = table.view(-1, SEGMENT_FIELDS), turns.view(-1, TURN_FIELDS)
        self.needs_correction = self.corrected.numel() > 0
        self._users: set[int | None] = set()

    def use(self) -> None:
        """To be called before the launches that read the tensors."""
        if not self._memory.is_cuda:
            return
        stream = current_stream(self._memory.device)
        if stream in self._users:  # the allocator waits, when it frees, for all that a stream it was told of has queued
            return
        self._memory.record_stream(torch.cuda.current_stream(self._memory.device))
        if stream is None:
            self._captured.append(self)
        self._users.add(stream)


class SplitForward:
    """`fused_forward` by segments, for batches of one content: called with its arguments, on torch's current stream.

    Where nothing is cut, the segments are whole sequences, the long ones first, and the forward runs alone.
    """

    def __init__(
        self,
        entries: Mapping[str, Callable[..., None]],
        segments: Segments,
        num_value_heads: int,
        window: str | float,
        device: torch.device,
    ):
        """entries: of `SPLIT_KERNELS`, by name; where nothing is cut, of `segment_forward` alone.

        Copies the cut to the device and waits for it, so every stream may call this.
        """
        self.segments = segments
        self._state, self._correct, self._forward = (entries.get(name) for name in SPLIT_KERNELS)
        self._log_tolerance = log_tolerance(window)
        self._tables = SegmentTables(segments, device)
        shape = len(segments), num_value_heads
        self.scratch: Layout = ((shape, torch.int32), (shape, torch.float32))

    def __call__(
        self, q, k, v, a, log_gates, bounds, state_rows, checkpoint_rows, initial, final, checkpoints, o, scale,
        has_initial, has_final, chunks_per_checkpoint, starts, decays,
    ) -> None:  # fmt: skip
        """Arguments as `launch` lists them for `fused_forward`; starts, decays: tensors as in `self.scratch`.

        o must share no memory with the inputs.
        """
        tables = self._tables
        tables.use()
        if self.segments.is_cut:
            self._state(
                k, v, a, log_gates, tables.turns, state_rows, initial, starts, decays, o, has_initial,
                self._log_tolerance, 0,
            )  # fmt: skip
        if tables.needs_correction:
            self._correct(tables.first_segments, tables.corrected, starts, decays, bounds, tables.segments, o)
        self._forward(
            q, k, v, a, log_gates, bounds, tables.segments, starts, state_rows, checkpoint_rows, initial, final,
            checkpoints, o, scale, has_initial, has_final, chunks_per_checkpoint,
        )  # fmt: skip


def cut_batch(problem: Problem, lengths, segment_chunks: int | None) -> Segments:
    """The cut into segments of at most ``segment_chunks`` chunks, but no fewer than `least_segment_chunks`."""
    return cut(lengths, problem.chunk_size, segment_chunks, least=least_segment_chunks(problem))
