"""Argument checks of the public operator: everything that can be wrong is refused here, before any launch.

`validate` turns the arguments into a frozen `Call`.  A repeated call finds its `Call` by content (shapes, dtypes,
flags, host lengths), never by the identity of a tensor, and pays no check twice.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from .argument_checks import (
    ALIGNMENT_BYTES,
    check_devices_and_dtypes,
    check_flags,
    check_lengths,
    check_out,
    check_shapes,
    refuse,
    refuse_alignment,
    require_tensors,
)
from .errors import InputError
from .ragged import num_checkpoints
from .segments import DEFAULT_WINDOW
from .state_checks import (
    check_checkpoint_every,
    check_final_state_out,
    check_initial_state,
    check_pool,
    check_state_dtype,
)

_MAX_CACHED_CALLS = 1024


@dataclass(frozen=True)
class Call:
    """One validated call.  Equal calls have equal shapes, dtypes, flags and host lengths; tensors take no part.

    batch, num_tokens: B and T.  num_sequences: N, equal to B without cu_seqlens.  dtype: of q, k, v and o.
    state_dtype: of the final state.  has_pool: initial_state is a pool, whose rows state_indices name.
    chunk_size: a hint.  window: "exact", or the tolerance of an approximate split.  window_share: of the value heads,
    those whose gates are known to decay; None where nothing is known.
    checkpoint_every: tokens between checkpoints, None for none.
    memo: what later stages derive from the content and want again in an equal call.
    cu_host: cumulative lengths, ``N + 1`` ints (multiples of T without cu_seqlens); None only when device-only
    cu_seqlens met a CUDA graph capture, where reading them is not allowed.
    """

    batch: int
    num_tokens: int
    num_sequences: int
    num_heads: int
    num_value_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    has_initial_state: bool
    output_final_state: bool
    state_v_first: bool
    state_dtype: torch.dtype
    chunk_size: int
    auto_cp: bool
    window: str | float
    cu_host: tuple[int, ...] | None
    has_pool: bool = False
    window_share: float | None = None
    checkpoint_every: int | None = None
    memo: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def group_size(self) -> int:
        """Value heads per query/key head."""
        return self.num_value_heads // self.num_heads

    @cached_property
    def is_empty(self) -> bool:
        """No token belongs to any sequence, as far as the host knows."""
        return self.batch * self.num_tokens == 0 or (self.cu_host is not None and self.cu_host[-1] == 0)

    @cached_property
    def runs_kernels(self) -> bool:
        """A card has something to do."""
        return self.device.type == "cuda" and not self.is_empty

    @cached_property
    def num_checkpoints(self) -> int:
        """Rows of the checkpoints."""
        return 0 if self.checkpoint_every is None else num_checkpoints(self.cu_host, self.checkpoint_every)


_calls: dict[tuple, Call] = {}


def validate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | list[int] | tuple[int, ...] | None = None,
    state_dtype: torch.dtype | None = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
    window: str | float = DEFAULT_WINDOW,
    window_share: float | None = None,
    out: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    checkpoint_every: int | None = None,
    final_state_out: torch.Tensor | None = None,
) -> Call:
    """Check the arguments of `api.chunk_gated_delta_rule`, which documents them, and describe them as a `Call`.

    Reads the device once, to copy cu_seqlens to the host, if they are on a GPU and cu_seqlens_cpu is None; never during
    the capture of a CUDA graph.  Raises InputError (malformed) or UnsupportedError (no implementation).
    """
    try:
        cu = None if cu_seqlens is None and cu_seqlens_cpu is None else _host_lengths(cu_seqlens, cu_seqlens_cpu)
        # Flags stand here with their types: 1 equals True, but is not what `check_flags` asks for.
        key = (
            q.shape, k.shape, v.shape, g.shape, beta.shape,
            q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype,
            q.device, k.device, v.device, g.device, beta.device,
            q.is_contiguous() and k.is_contiguous() and v.is_contiguous(),
            scale, output_final_state, state_v_first, state_dtype, chunk_size, auto_cp, window, window_share,
            checkpoint_every, type(scale), type(chunk_size), type(auto_cp), type(window), type(checkpoint_every), cu,
            None if initial_state is None else _traits(initial_state),
            None if cu_seqlens is None else _traits(cu_seqlens),
            None if out is None else _traits(out),
            None if state_indices is None else _traits(state_indices),
            None if final_state_out is None else _traits(final_state_out),
        )  # fmt: skip
        call = _calls.get(key)
    except (AttributeError, TypeError) as error:
        # Also reached by well-formed tensors with an unhashable flag, which the checks below name.
        require_tensors(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, out=out,
            state_indices=state_indices, final_state_out=final_state_out,
        )  # fmt: skip
        raise InputError(f"flags and lengths must be plain values, but got {error}; pass numbers instead.") from error
    if call is None:
        call = _check_all(
            q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu, state_dtype,
            chunk_size, auto_cp, window, window_share, out, state_indices, checkpoint_every, final_state_out,
        )  # fmt: skip
        if len(_calls) >= _MAX_CACHED_CALLS:
            _calls.clear()
        _calls[key] = call
    if q.is_cuda:
        # Addresses are no part of the content, so they are looked at in every call.
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        for x in (initial_state, out, final_state_out):
            if x is not None:
                addresses |= x.data_ptr()
        if addresses % ALIGNMENT_BYTES:
            refuse_alignment(q=q, k=k, v=v, initial_state=initial_state, out=out, final_state_out=final_state_out)
    return call


def _traits(x: torch.Tensor) -> tuple:
    return x.shape, x.dtype, x.device, x.is_contiguous()


def _host_lengths(cu_seqlens, cu_seqlens_cpu) -> tuple[int, ...] | None:
    """Cumulative lengths on the host; None if they would have to be read from the device during a graph capture."""
    # Spelled with `if`, unlike the other checks: this runs in every call, and its messages are not free.
    if cu_seqlens is None:
        refuse(
            InputError,
            "cu_seqlens is not None when cu_seqlens_cpu is given",
            "cu_seqlens=None",
            "pass both; cu_seqlens_cpu is the host copy of cu_seqlens.",
        )
    _check_index_vector("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is None:
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        return tuple(cu_seqlens.tolist())
    if isinstance(cu_seqlens_cpu, torch.Tensor):
        _check_index_vector("cu_seqlens_cpu", cu_seqlens_cpu)
        if not cu_seqlens_cpu.is_cpu:
            refuse(
                InputError,
                "cu_seqlens_cpu is on the CPU",
                f"device {cu_seqlens_cpu.device}",
                "pass cu_seqlens.cpu(), made once outside the loop.",
            )
        cu = tuple(cu_seqlens_cpu.tolist())
    else:
        cu = tuple(map(operator.index, cu_seqlens_cpu))
    # Contents are compared only where that is free; on CUDA it would be the copy that the host lengths avoid.
    if cu_seqlens.numel() != len(cu) or (cu_seqlens.is_cpu and tuple(cu_seqlens.tolist()) != cu):
        refuse(
            InputError,
            "cu_seqlens and cu_seqlens_cpu are equal",
            f"{cu_seqlens.numel()} and {len(cu)} numbers" if cu_seqlens.numel() != len(cu) else "different numbers",
            "copy one from the other.",
        )
    return cu


def _check_index_vector(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or x.numel() < 1:
        refuse(
            InputError,
            f"{name} is a 1-D int32 or int64 tensor of N + 1 >= 1 numbers",
            f"shape {tuple(x.shape)} of {x.dtype}",
            "pass cumulative lengths such as torch.tensor([0, 5, 12], dtype=torch.int32).",
        )


def _check_all(
    q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu, state_dtype, chunk_size,
    auto_cp, window, window_share, out, state_indices, checkpoint_every, final_state_out,
) -> Call:  # fmt: skip
    """Every check that depends on content only, and the `Call` that they earn."""
    optional = dict(
        initial_state=initial_state, cu_seqlens=cu_seqlens, out=out, state_indices=state_indices,
        final_state_out=final_state_out,
    )  # fmt: skip
    require_tensors(q=q, k=k, v=v, g=g, beta=beta, **optional)
    check_shapes(q, k, v, g, beta)
    check_devices_and_dtypes(q, k, v, g, beta, **optional)
    batch, tokens, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    kind = q.device.type
    if cu_seqlens is None:
        sequences, cu = batch, tuple(n * tokens for n in range(batch + 1))
    else:
        sequences = cu_seqlens.numel() - 1
        check_lengths(batch, tokens, cu)
    if state_dtype is None:
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if state_indices is not None and initial_state is not None:
            state_dtype = initial_state.dtype  # a pool is written in place
    check_state_dtype(state_dtype, kind)
    dims = (value_heads, dim_v, dim_k) if state_v_first else (value_heads, dim_k, dim_v)
    if state_indices is not None:
        check_pool(initial_state, state_indices, sequences, dims, state_dtype, final_state_out)
    elif initial_state is not None:
        check_initial_state(initial_state, (sequences, *dims), state_v_first, state_dtype)
    if out is not None:
        check_out(out, v)
    if final_state_out is not None:
        check_final_state_out(final_state_out, (sequences, *dims), state_dtype, output_final_state)
    if checkpoint_every is not None:
        check_checkpoint_every(checkpoint_every, cu)
    check_flags(scale, chunk_size, auto_cp, window, window_share)
    return Call(
        batch=batch,
        num_tokens=tokens,
        num_sequences=sequences,
        num_heads=heads,
        num_value_heads=value_heads,
        head_dim_k=dim_k,
        head_dim_v=dim_v,
        dtype=q.dtype,
        device=q.device,
        scale=dim_k**-0.5 if scale is None else float(scale),
        has_initial_state=initial_state is not None,
        output_final_state=bool(output_final_state),
        state_v_first=bool(state_v_first),
        state_dtype=state_dtype,
        chunk_size=chunk_size,
        auto_cp=auto_cp,
        window=window,
        window_share=window_share,
        cu_host=cu,
        has_pool=state_indices is not None,
        checkpoint_every=checkpoint_every,
    )
