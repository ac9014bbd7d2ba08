"""The chunk form in plain PyTorch: what CPU tensors run, and a fallback on any device.

The two-step form of the kernels (docs/MATH.md (14), (15)): with ``Ã = A' diag(β)`` and ``Y = V − diag(γ) K S``,
``O = scale (diag(γ) Q S + (tril(Q Kᵀ) Ã ∘ Γ) Y)`` and ``S ← γ_C S + (diag(γ_C/γ) Ãᵀ K)ᵀ Y``.  Every exponential is of a
difference ≤ 0, so no gate overflows.  Vectorised over sequences and heads; the loop runs over the chunks of the longest
sequence of a group, or, with ``segment_chunks``, of the longest segment.  Differentiable by autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from .ragged import ChunkSteps, cumulative_lengths, gather_rows, restore_order, scatter_rows
from .segments import Segments, cut

#: State elements of the sequences that run together; other per-step tensors are of the same order.
_GROUP_ELEMENTS = 1 << 24


def chunk_form(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    chunk_size: int = 64,
    operand_dtype: torch.dtype | None = None,
    checkpoint_every: int | None = None,
    segment_chunks: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gated DeltaNet forward in fp32 (in float64 if q is float64).

    q, k: ``[B, T, H, K]``, k L2-normalised.  v: ``[B, T, HV, V]``, HV a multiple of H.  g (log space, finite), beta:
    ``[B, T, HV]``.  Any float dtype.  initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first.
    cu_seqlens: host ints; then B = 1.  operand_dtype: round the operands of every product but K Kᵀ to this dtype, as a
    kernel of that dtype does; used to set tolerances.  checkpoint_every: a multiple of chunk_size, in tokens.
    segment_chunks: run long sequences as segments of at most so many chunks (more, if that is less than
    checkpoint_every), side by side; the result is the same but for rounding.

    Returns (o ``[B, T, HV, V]`` in q's dtype, final state in ``state_dtype``, by default the dtype computed in), and
    with checkpoint_every the states after every so many tokens of each sequence, ``[rows, HV, K, V]`` like the final
    state.  Rows of o past ``cu_seqlens[-1]`` are 0.  The caller has validated the arguments.
    """
    batch, tokens, heads, dim_v = v.shape
    dim_k = q.shape[-1]
    scale = dim_k**-0.5 if scale is None else scale
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    cu = cumulative_lengths(batch, tokens, cu_seqlens)
    if segment_chunks is not None:
        lengths = [end - start for start, end in zip(cu, cu[1:])]
        segments = cut(lengths, chunk_size, segment_chunks, (checkpoint_every or chunk_size) // chunk_size)
        if segments.is_cut:
            rows = [x.flatten(0, 1)[None] for x in (q, k, v, g, beta)]
            options = dict(state_dtype=state_dtype, operand_dtype=operand_dtype, checkpoint_every=checkpoint_every)
            o, *states = _in_segments(*rows, scale, initial_state, segments, state_v_first, **options)
            return o.view(batch, tokens, heads, dim_v), *states
    groups = list(_groups(cu, chunk_size, heads * dim_k * dim_v))
    all_steps = [ChunkSteps.of(cu, chunk, v.device, names) for names, chunk in groups]
    order = [n for steps in all_steps for n in steps.sequences]
    inputs = zip(*(gather_rows(all_steps, x.flatten(0, 1)) for x in (q, k, v, g, beta)))

    def step(state, *chunk):
        return _chunk(state, *chunk, scale, compute, operand_dtype)

    def stored(state):
        return (state.mT if state_v_first else state).to(state_dtype or compute)

    checkpoints = None if checkpoint_every is None else _Checkpoints(cu, checkpoint_every, stored)
    parts, states = [], []
    initials = _initial_states(initial_state, order, all_steps)
    for (_, chunk), steps, initial, streams in zip(groups, all_steps, initials, inputs):
        if initial is None:
            state = torch.zeros(len(steps.sequences), heads, dim_k, dim_v, dtype=compute, device=v.device)
        else:
            state = (initial.mT if state_v_first else initial).to(compute)
        visit = step if checkpoints is None else checkpoints.watch(step, steps.sequences, chunk)
        outs, final = steps.scan(visit, state, *streams)
        parts.append((steps, outs))
        states.append(stored(final))
    o = scatter_rows(parts, batch * tokens, q.new_empty(heads, dim_v)).unflatten(0, (batch, tokens))
    none = stored(torch.empty(0, heads, dim_k, dim_v, dtype=compute, device=v.device))
    final = restore_order(states, order) if states else none
    return (o, final) if checkpoints is None else (o, final, checkpoints.joined(none))


def _in_segments(q, k, v, g, beta, scale, initial_state, segments: Segments, state_v_first, operand_dtype, **options):
    """`chunk_form` in three steps: what every segment does to a state, where each one starts, the segments themselves.

    A segment turns S into ``M S + S*`` (docs/MATH.md (10), (11)).  S* is what it leaves of a zero state, M what it
    leaves of the identity with V = 0: the same recurrence on further value columns.
    """
    heads, dim_k, dim_v = v.shape[2], q.shape[-1], v.shape[-1]
    common = dict(cu_seqlens=segments.bounds, chunk_size=segments.chunk_size, operand_dtype=operand_dtype)

    wide = torch.cat([v, v.new_zeros(*v.shape[:3], dim_k)], -1)
    identity = torch.cat([q.new_zeros(dim_k, dim_v), torch.eye(dim_k, dtype=q.dtype, device=q.device)], -1)
    identity = identity.expand(len(segments), heads, dim_k, dim_v + dim_k)
    _, ends = chunk_form(k, k, wide, g, beta, scale, identity, **common)
    additions, transfers = ends.split([dim_v, dim_k], -1)

    states = [additions.new_zeros(heads, dim_k, dim_v)] * len(segments.lasts)
    if initial_state is not None:
        states = list((initial_state.mT if state_v_first else initial_state).to(ends.dtype))
    starts = []
    for n, transfer, addition in zip(segments.sequences, transfers, additions):
        starts.append(states[n])
        states[n] = transfer @ states[n] + addition
    starts = torch.stack(starts)

    starts = starts.mT if state_v_first else starts
    o, ends, *checkpoints = chunk_form(
        q, k, v, g, beta, scale, starts, state_v_first=state_v_first, **common, **options
    )
    lasts = torch.tensor(segments.lasts, dtype=torch.int64, device=ends.device)
    return o, ends.index_select(0, lasts), *checkpoints


class _Checkpoints:
    """States after every ``every`` tokens of each sequence, collected while the recurrences of the groups run."""

    def __init__(self, cu: Sequence[int], every: int, stored: Callable[[torch.Tensor], torch.Tensor]):
        """stored: a state as it is to be returned."""
        self._lengths = [end - start for start, end in zip(cu, cu[1:])]
        self._every, self._stored = every, stored
        self._firsts = [0, *itertools.accumulate(length // every for length in self._lengths)]
        self._rows: list[int] = []
        self._states: list[torch.Tensor] = []

    def watch(self, step: Callable, sequences: Sequence[int], chunk: int) -> Callable:
        """``step`` over the chunks of ``sequences``, longest first, that keeps the states that are due."""
        ends = itertools.count(chunk, chunk)

        def watched(state, *inputs):
            out, state = step(state, *inputs)
            end = next(ends)
            if end % self._every == 0:
                due = [n for n in sequences if self._lengths[n] >= end]
                self._rows.extend(self._firsts[n] + end // self._every - 1 for n in due)
                self._states.append(self._stored(state[: len(due)]))
            return out, state

        return watched

    def joined(self, none: torch.Tensor) -> torch.Tensor:
        """Every checkpoint, those of one sequence together; ``none`` if there is none."""
        return restore_order(self._states, self._rows) if self._rows else none


def _initial_states(initial_state, order, all_steps):
    """The initial states of each group, taken at once in the order of the groups; None for each if there are none."""
    if initial_state is None:
        return [None] * len(all_steps)
    rows = initial_state.index_select(0, torch.tensor(order, dtype=torch.int64, device=initial_state.device))
    return rows.split([len(steps.sequences) for steps in all_steps])


def _chunk(state, q, k, v, g, beta, scale, compute, operand_dtype):
    """One chunk of every sequence of a group: rows ``[n, C, heads, ...]``, state ``[n, HV, K, V]``."""

    def operand(x):
        return x if operand_dtype is None else x.to(operand_dtype).to(compute)

    group = v.shape[2] // q.shape[2]
    q, k, v, beta = (x.transpose(1, 2).to(compute) for x in (q, k, v, beta))  # [n, heads, C, ...]
    # Gates are summed in float64: the difference of two large sums keeps its digits.
    g = g.transpose(1, 2).double().cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().to(compute).exp().tril()
    tail = (g[..., -1:] - g).to(compute).exp()[..., None]
    gamma = g.to(compute).exp()[..., None]

    overlap = (k @ k.mT).repeat_interleave(group, 1)
    scores = operand((q @ k.mT).tril()).repeat_interleave(group, 1)
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    lower = (beta[..., None] * overlap).tril(-1)
    a = operand(torch.linalg.solve_triangular(lower, beta.diag_embed(), upper=False, unitriangular=True))
    b = operand((scores @ a) * decay)
    x = operand(tail * (a.mT @ k))

    seen = operand(state)
    y = operand(v - gamma * (k @ seen))
    o = scale * (gamma * (q @ seen) + b @ y)
    return o.transpose(1, 2), gamma[..., -1:, :] * state + x.mT @ y


def _groups(cu: Sequence[int], chunk_size: int, state_elements: int) -> Iterator[tuple[list[int], int]]:
    """Sequences that run together, longest first, and their chunk size: alike in length, within the memory bound.

    Sequences shorter than a chunk get one no longer than twice their length: padding must not multiply the memory that
    thousands of them need.
    """

    def chunk_of(n: int) -> int:
        length, chunk = cu[n + 1] - cu[n], chunk_size
        while chunk > 1 and chunk // 2 >= length:
            chunk //= 2
        return chunk

    limit = max(1, _GROUP_ELEMENTS // state_elements)
    order = sorted(range(len(cu) - 1), key=lambda n: cu[n] - cu[n + 1])
    for chunk, alike in itertools.groupby(order, key=chunk_of):
        alike = list(alike)
        for first in range(0, len(alike), limit):
            yield alike[first : first + limit], chunk
