"""Memory that calls use again: the intermediates of the kernels, kept by the caller instead of allocated per call.

Where a caller keeps none, small ones are kept here, per thread and stream: `take_kept`.
"""

from __future__ import annotations

import itertools
import math
import threading

import torch

from . import activation, launch
from .config import CHUNK_SIZES, OpConfig, Problem
from .device_indices import current_stream, is_capturing
from .errors import InputError

#: Shape and dtype of each tensor.
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]

_ALIGNMENT_BYTES = 256  # what torch's allocator gives every tensor
_MAX_CACHED_VIEWS = 256
#: Of one call's intermediates in `take_kept`: the kernels of larger calls outlast their allocations.
MAX_KEPT_BYTES = 32 << 20
_MAX_KEPT_STREAMS = 4


class Workspace:
    """A buffer on one card that grows to the largest call and never shrinks; empty at first.

    One workspace serves the calls of one stream, one after another, whatever their configs: calls on two streams that
    share one would overwrite each other's intermediates.  Give every stream its own.

    A CUDA graph that was captured with a workspace reads it in every replay, so the workspace must outlive the graph,
    and replays belong to the workspace's stream.  Buffers that were outgrown after a capture are kept for its sake;
    `reserve` before the first capture keeps that from happening.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._views: dict[tuple[Layout, torch.device], tuple[torch.Tensor, ...]] = {}
        self._captured: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the buffer in use."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, config: OpConfig, tokens: int, sequences: int, device: torch.device | str = "cuda") -> None:
        """Grow to `workspace_bytes` of the largest call expected; "cuda" is torch's current card."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._grow(workspace_bytes(config, tokens, sequences), device)

    def take(self, layout: Layout, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Tensors of these shapes and dtypes, side by side in the buffer, with the content of an earlier call.

        Raises InputError on another device than that of earlier calls.
        """
        found = self._place(layout, device)
        if is_capturing(device) and not any(kept is self._buffer for kept in self._captured):
            self._captured.append(self._buffer)
        return found

    def _place(self, layout: Layout, device: torch.device) -> tuple[torch.Tensor, ...]:
        found = self._views.get((layout, device))
        if found is None:
            self._grow(num_bytes(layout), device)
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            found = self._views[layout, device] = carve(self._buffer, layout)
        return found

    def _grow(self, num_bytes: int, device: torch.device) -> None:
        if self._buffer is not None:
            if self._buffer.device != device:
                raise InputError(
                    f"`workspace.device == q.device` must hold, but got {self._buffer.device} and {device}; "
                    "make a Workspace per card and stream."
                )
            if self._buffer.numel() >= num_bytes:
                return
        self._views.clear()
        self._buffer = None  # freed first, so that both need not fit
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _Kept(threading.local):
    """The workspaces of one thread, by card and stream, oldest first."""

    def __init__(self) -> None:
        self.workspaces: dict[tuple[int | None, int], Workspace] = {}


_kept = _Kept()


def take_kept(layout: Layout, device: torch.device) -> tuple[torch.Tensor, ...] | None:
    """`Workspace.take` of a workspace that belongs to this thread and torch's current stream, one of ``device``.

    None while a CUDA graph is captured: its memory must be its own.  Two threads may launch on one stream in turns,
    kernel by kernel, so they share nothing; and a stream's memory goes back to that stream, when the thread ends or has
    since used four others.  So a thread holds at most four times the largest layout, `MAX_KEPT_BYTES` by its callers.
    """
    stream = current_stream(device)
    if stream is None:
        return None
    workspaces, key = _kept.workspaces, (device.index, stream)
    workspace = workspaces.get(key)
    if workspace is None:
        if len(workspaces) >= _MAX_KEPT_STREAMS:
            del workspaces[next(iter(workspaces))]
        workspace = workspaces[key] = Workspace()
    return workspace._place(layout, device)


def intermediates(problem: Problem, tokens: int, sequences: int) -> Layout:
    """``a`` and ``log_gates`` of the kernels (`launch`) for ``tokens`` tokens in all of ``sequences`` sequences."""
    shape = launch.inverse_shape(problem, tokens, sequences)
    return (shape, launch.torch_dtype(problem.dtype)), (shape[:3], torch.float32)


def workspace_bytes(config: OpConfig, tokens: int, sequences: int) -> int:
    """Bytes that a call on ``tokens`` tokens in all of ``sequences`` sequences takes from its workspace, at most.

    Per value head and slot, of which there are ``tokens // 64 + sequences``: 64 · 64 elements of q's dtype and 64 fp32
    gates; 8.25 KiB per slot and value head for bf16 and chunks of 64.  Where sequences are cut, 8 B per segment and
    value head.  Where config.activation is set also copies of q and k, and g and beta in fp32: calls that do not ask
    for all of these take less.
    """
    layouts = [intermediates(config.problem("fused_forward", c), tokens, sequences) for c in CHUNK_SIZES]
    activated = ()
    if config.activation:
        activated = activation.outputs(config.problem("input_activation"), activation.ALL_MODES, tokens)
    return max(num_bytes(layout + activated) for layout in layouts) + _split_bytes(config, tokens, sequences)


def _split_bytes(config: OpConfig, tokens: int, sequences: int) -> int:
    """Of the scratch of a split (`split.SplitForward`) into as many segments as there can be."""
    from .segments import least_segment_chunks

    problem = config.problem("segment_forward")
    least = least_segment_chunks(problem) * problem.chunk_size
    if tokens < 2 * least:
        return 0
    return 2 * _aligned(4 * (tokens // least + sequences) * config.num_value_heads)


def num_bytes(layout: Layout) -> int:
    """What tensors of these shapes and dtypes take of a workspace."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def offsets(layout: Layout) -> list[int]:
    """Where each tensor of a layout starts in its buffer, in bytes."""
    ends = itertools.accumulate(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)
    return [0, *ends][: len(layout)]


def carve(buffer: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The tensors of a layout in a buffer of at least `num_bytes`."""
    parts = []
    for (shape, dtype), first in zip(layout, offsets(layout)):
        parts.append(buffer[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return tuple(parts)
