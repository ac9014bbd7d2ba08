"""Small int32 tensors that kernels read: cumulative lengths, rows of states, first rows of checkpoints.

What one stream writes, another may read too early, or still read when the memory is freed and written again.  So:

- What depends on a call's content is kept per content, device and stream: only the stream that wrote it reads it.
- The capture of a CUDA graph makes its own, and keeps nothing: a graph replays on any stream, its memory must not
  outlive it, and memory that may be evicted here must not be read by it.  Lengths given as int32 need nothing made.
- `ramp` is complete before anyone sees it, and never freed: every stream and every graph may read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .validate import Call

_MAX_KEPT = 256
_MIN_RAMP = 4096
_kept: dict[tuple, torch.Tensor] = {}
_ramps: dict[torch.device, torch.Tensor] = {}
_ramp_views: dict[tuple[torch.device, int], torch.Tensor] = {}


def bounds(call: Call, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Cumulative lengths ``[N + 1]`` of a call: the caller's tensor where it is int32 already."""
    if cu_seqlens is None:
        end, step = call.batch * call.num_tokens + 1, call.num_tokens
        make = lambda: torch.arange(0, end, step, dtype=torch.int32, device=call.device)
        return _keep((end, step), call.device, make)
    if cu_seqlens.dtype == torch.int32:
        return cu_seqlens
    if call.cu_host is None:
        return cu_seqlens.to(torch.int32)
    return _keep(call.cu_host, call.device, lambda: cu_seqlens.to(torch.int32))


def checkpoint_rows(call: Call, bounds: torch.Tensor) -> torch.Tensor:
    """The row of each sequence's first checkpoint ``[N]``."""
    every = call.checkpoint_every

    def make() -> torch.Tensor:
        counts = bounds.diff() // every
        return (counts.cumsum(0) - counts).to(torch.int32)

    return _keep((call.cu_host, every), call.device, make)


def ramp(size: int, device: torch.device) -> torch.Tensor:
    """0, 1, 2 … ``[size]``: the row of each sequence's state where states lie in the order of the sequences."""
    found = _ramp_views.get((device, size))
    if found is not None:
        return found
    base = _ramps.get(device)
    if base is None or base.numel() < size:
        if is_capturing(device):
            return torch.arange(size, dtype=torch.int32, device=device)
        base = _ramps[device] = _make_ramp(max(_MIN_RAMP, 1 << (size - 1).bit_length()), device)
    # Views keep the memory of outgrown ramps, which captured graphs may read.
    found = _ramp_views[device, size] = base[:size]
    return found


def _make_ramp(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.arange(size, dtype=torch.int32, device=device)
    # On a stream of its own, so that the host waits for these few microseconds and for nothing that is queued.
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        made = torch.arange(size, dtype=torch.int32, device=device)
    stream.synchronize()
    return made


def _keep(content: tuple, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``make()``, once per content, device and stream; anew while a graph is captured."""
    stream = current_stream(device)
    if stream is None:
        return make()
    key = (content, device, stream)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        found = _kept[key] = make()
    return found


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream records a CUDA graph."""
    return _has_streams(device) and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int | None:
    """The handle of torch's current stream, 0 on the CPU; None while it records a CUDA graph."""
    return None if is_capturing(device) else _stream(device)


def _stream(device: torch.device) -> int:
    """The handle of torch's current stream; the public way to it makes an object, for ten times as long."""
    return torch._C._cuda_getCurrentRawStream(device.index) if _has_streams(device) else 0


@functools.cache
def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"  # a new string in every call, for longer than it takes to look this up
