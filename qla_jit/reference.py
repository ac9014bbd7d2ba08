"""Float64 references: the token recurrence that defines the operator, its chunk form, and one per kernel.

Written to be obviously right, not fast: loops over tokens (or chunks), vectorised over sequences and heads, on any
device, differentiable by autograd.  Equation numbers are those of docs/MATH.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .ragged import ChunkSteps, cumulative_lengths, equal_chunks, gather_rows, num_slots, restore_order, scatter_rows
from .segments import Segments

LOG2_E = 1.0 / math.log(2.0)


def recurrent_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: ``S ← α (I − β k kᵀ) S + β k vᵀ``, ``o = scale · Sᵀ q``, with ``α = exp(g)``. (1)

    q, k: ``[B, T, H, K]``.  v: ``[B, T, HV, V]``; value head h uses q/k head ``h // (HV // H)``.  g, beta:
    ``[B, T, HV]``, g in log space.  scale: ``K ** -0.5`` by default.  initial_state: ``[N, HV, K, V]``, or
    ``[N, HV, V, K]`` with state_v_first; zero if None.  cu_seqlens: host ints; then B = 1, and N = len − 1.

    Returns (o ``[B, T, HV, V]``, final state in the layout asked for), float64.  Rows past ``cu_seqlens[-1]`` are 0.
    """

    def step(state, q, k, v, g, beta):
        q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
        old = torch.einsum("nhk,nhkv->nhv", k, state)
        state = g.exp()[..., None, None] * (state - torch.einsum("nh,nhk,nhv->nhkv", beta, k, old))
        state = state + torch.einsum("nh,nhk,nhv->nhkv", beta, k, v)
        return scale * torch.einsum("nhk,nhkv->nhv", q, state)[:, None], state

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(step, 1, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)


def chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk by chunk (2)-(9), the form the kernels start from; arguments and results as in `recurrent_reference`."""

    def step(state, q, k, v, g, beta):
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))  # [n, HV, C, ...]
        g = g.cumsum(-1)
        gamma, last = g.exp()[..., None], g[..., -1:]
        decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
        lower = (beta[..., None] * (k @ k.mT)).tril(-1) * decay
        y = beta[..., None] * (v - gamma * (k @ state))
        u = torch.linalg.solve_triangular(lower, y, upper=False, unitriangular=True)
        o = scale * (gamma * (q @ state) + ((q @ k.mT) * decay) @ u)
        state = last.exp()[..., None] * state + ((last - g).exp()[..., None] * k).mT @ u
        return o.transpose(1, 2), state

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(step, chunk_size, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)


def input_activation_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalize: bool = False,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """(q, k, g, beta) as the operator takes them, float64, of any leading dims.

    normalize: ``x / sqrt(Σ x² + 1e-6)`` for q and k.  a_log, dt_bias: ``[HV]``; g becomes
    ``−exp(A_log) ln(1 + exp(g + dt_bias))``.  beta_scale: beta becomes ``beta_scale · sigmoid(beta)``.  What is None or
    False is left as it is.
    """
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if a_log is not None:
        shifted = g if dt_bias is None else g + dt_bias.double()
        g = -a_log.double().exp() * torch.logaddexp(shifted, torch.zeros_like(shifted))
    if beta_scale is not None:
        beta = beta_scale / (1.0 + (-beta).exp())
    return q, k, g, beta


#: What the fused forward kernel computes, given the outputs of the two kernels below.
fused_forward_reference = chunk_reference


def kkt_inverse_reference(
    k: torch.Tensor, beta: torch.Tensor, cu_seqlens: Sequence[int] | None = None, chunk_size: int = 64
) -> torch.Tensor:
    """``A' diag(β) = (I + tril(diag(β) K Kᵀ, −1))⁻¹ diag(β)`` of every chunk (5).

    k: ``[B, T, H, K]``.  beta: ``[B, T, HV]``.  Returns ``[num_slots, HV, C, C]`` float64 in the slot layout of
    `ragged`; 0 in rows and columns of absent tokens, and in slots that no chunk owns.
    """
    cu = cumulative_lengths(*beta.shape[:2], cu_seqlens)
    keys = k.flatten(0, 1).double().repeat_interleave(beta.shape[2] // k.shape[2], 1)
    beta = beta.flatten(0, 1).double()
    slots = num_slots(beta.shape[0], len(cu) - 1, chunk_size)
    out = beta.new_zeros(slots, beta.shape[1], chunk_size, chunk_size)
    for chunks in equal_chunks(cu, chunk_size, beta.device):
        kc, bc = (x[chunks.tokens].transpose(1, 2) for x in (keys, beta))  # [n, HV, c, K], [n, HV, c]
        c = bc.shape[-1]
        lower = (bc[..., None] * (kc @ kc.mT)).tril(-1)
        inverse = torch.linalg.solve_triangular(lower, bc.diag_embed(), upper=False, unitriangular=True)
        out[chunks.slots, :, :c, :c] = inverse
    return out


def gate_scan_reference(g: torch.Tensor, cu_seqlens: Sequence[int] | None = None, chunk_size: int = 64) -> torch.Tensor:
    """Chunk-local inclusive cumulative sum of g, times log2(e) so that kernels may use exp2 (2).

    g: ``[B, T, HV]`` in log space.  Returns ``[num_slots, HV, C]`` float64 in the slot layout of `ragged`; absent
    tokens repeat the last present token's value, slots that no chunk owns hold 0.
    """
    cu = cumulative_lengths(*g.shape[:2], cu_seqlens)
    gates = g.flatten(0, 1).double()
    out = gates.new_zeros(num_slots(gates.shape[0], len(cu) - 1, chunk_size), gates.shape[1], chunk_size)
    for chunks in equal_chunks(cu, chunk_size, gates.device):
        total = gates[chunks.tokens].cumsum(1).transpose(1, 2) * LOG2_E  # [n, HV, c]
        c = total.shape[-1]
        out[chunks.slots, :, :c] = total
        out[chunks.slots, :, c:] = total[..., -1:]
    return out


def segment_state_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    segments: Segments,
    initial_state: torch.Tensor | None = None,
    warmup: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(S*, M)`` of every segment and value head: a segment makes ``M S + S*`` of the state S it starts from (10).

    S* is what the recurrence leaves from a zero start, M what it leaves with V = 0 from the identity (11), (12).
    k: ``[B, T, H, K]``.  v: ``[B, T, HV, V]``.  g, beta: ``[B, T, HV]``.

    With initial_state (``[N, HV, K, V]``) the first segments start from it instead: their S* is the state they leave,
    and their M is 0.  With warmup (``[segments, HV]``, of `warmup_chunks_reference`) a segment runs only the chunks
    that the next one's window asks for, from zero, where that window holds; M is 0 there.

    Returns float64 ``[segments, HV, K, V]`` and ``[segments, HV, K, K]``, both transposed with state_v_first.
    """
    heads, dim_k, dim_v = v.shape[2], k.shape[-1], v.shape[-1]
    beta = beta.flatten(0, 1).double().clone()
    # One recurrence for both: M is the state of K further value columns that hold nothing.
    state = beta.new_zeros(len(segments), heads, dim_k, dim_v + dim_k)
    state[..., dim_v:] = torch.eye(dim_k, dtype=beta.dtype, device=beta.device)
    if initial_state is not None:
        state[list(segments.firsts[:-1])] = 0.0
        state[list(segments.firsts[:-1]), ..., :dim_v] = (initial_state.mT if state_v_first else initial_state).double()
    counts = [] if warmup is None else warmup.tolist()
    for successor, of_heads in enumerate(counts):
        for head, count in enumerate(of_heads):
            if segments.window_holds(successor, count):
                # β = 0 writes nothing, and decay keeps a zero: the state before the window stays 0.
                window = segments.bounds[successor] - count * segments.chunk_size
                beta[segments.bounds[successor - 1] : window, head] = 0.0
                state[successor - 1, head] = 0.0
    values = torch.cat([v.double(), v.new_zeros(*v.shape[:3], dim_k, dtype=torch.float64)], -1)
    beta = beta.unflatten(0, v.shape[:2])
    _, end = chunk_reference(
        k, k, values, g, beta, initial_state=state, cu_seqlens=segments.bounds, chunk_size=segments.chunk_size
    )
    parts = end.split([dim_v, dim_k], -1)
    return tuple((part.mT if state_v_first else part).contiguous() for part in parts)


def segment_correct_reference(
    states: torch.Tensor,
    transfers: torch.Tensor,
    segments: Segments,
    initial_state: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that every segment starts from, and the final state of every sequence: ``S ← M S + S*`` over segments.

    states, transfers: results of `segment_state_reference`, in the layout that state_v_first names; so is
    initial_state, ``[N, HV, K, V]``, zero if None.  Returns float64 ``[segments, HV, K, V]`` and ``[N, HV, K, V]``.
    """
    states, transfers = ((x.mT if state_v_first else x).double() for x in (states, transfers))
    if initial_state is None:
        initial = states.new_zeros(len(segments.lasts), *states.shape[1:])
    else:
        initial = (initial_state.mT if state_v_first else initial_state).double()
    starts, finals = [], list(initial)
    for n, transfer, state in zip(segments.sequences, transfers, states):
        starts.append(finals[n])
        finals[n] = transfer @ finals[n] + state
    both = (torch.stack(x) if x else states for x in (starts, finals))
    return tuple((x.mT if state_v_first else x).contiguous() for x in both)


def warmup_chunks_reference(
    g: torch.Tensor, segments: Segments, tolerance: float | None, excess: float = 0.0
) -> torch.Tensor:
    """Chunks before each segment that must run, from a zero state, to give the state it starts from to ``tolerance``.

    The fewest that change no state by a factor of norm above ``tolerance``; all before the segment if none do, or if
    tolerance is None, which is exact.  A token changes a state by at most ``exp(g) max(1, β ‖k‖² − 1)`` (13).  So the
    start state is off by at most ``tolerance`` times the norm of the state before those chunks, spectral or Frobenius.

    g: ``[B, T, HV]`` in log space.  excess: what ``β ‖k‖² − 2`` may be at most; 0 holds for β ≤ 1 and any k of norm
    ≤ √2, and for β ≤ 2 and keys of norm ≤ 1; keys that were normalised and then rounded may be longer.

    Returns int64 ``[segments, HV]``.  A count of all chunks means the sequence's own start and initial state.
    """
    gates, chunk = g.flatten(0, 1).double() + math.log1p(excess), segments.chunk_size
    limit = math.log(tolerance) if tolerance else -math.inf
    counts = torch.zeros(len(segments), g.shape[2], dtype=torch.int64, device=g.device)
    for segment, (start, before) in enumerate(zip(segments.bounds, segments.first_chunks)):
        of_chunks = gates[start - before * chunk : start].unflatten(0, (before, chunk)).sum(1) if before else gates[:0]
        # The nearest chunk first; each needs to run if those nearer leave more than the tolerance.
        left = torch.cat([gates.new_zeros(1, g.shape[2]), of_chunks.flip(0)]).cumsum(0)[:before]
        counts[segment] = (left > limit).to(torch.int64).cumprod(0).sum(0)
    return counts


def _run(step, chunk_size, q, k, v, g, beta, initial_state, cu_seqlens, state_v_first):
    """Walk the chunks of all sequences with `step`, on float64 rows with q and k repeated to the value heads."""
    batch, tokens, heads, dim_v = v.shape
    group = heads // q.shape[2]
    cu = cumulative_lengths(batch, tokens, cu_seqlens)
    steps = ChunkSteps.of(cu, chunk_size, v.device)
    rows = [x.flatten(0, 1).double() for x in (q, k, v, g, beta)]
    rows[:2] = (x.repeat_interleave(group, 1) for x in rows[:2])
    if initial_state is None:
        state = rows[0].new_zeros(len(cu) - 1, heads, q.shape[-1], dim_v)
    else:
        state = initial_state.double().mT if state_v_first else initial_state.double()
        state = state.index_select(0, torch.tensor(steps.sequences, dtype=torch.int64, device=v.device))
    outs, final = steps.scan(step, state, *(gather_rows([steps], x)[0] for x in rows))
    o = scatter_rows([(steps, outs)], batch * tokens, rows[0].new_empty(heads, dim_v))
    final = restore_order([final], steps.sequences)
    return o.unflatten(0, (batch, tokens)), final.mT.contiguous() if state_v_first else final
