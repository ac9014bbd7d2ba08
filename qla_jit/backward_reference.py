"""Float64 references of the kernels of the backward pass, one per kernel, chunk by chunk.

Written to be obviously right, not fast: loops over chunks, vectorised over heads and over chunks that do not wait for
each other.  With γ the decay from the chunk's start, Γ_ij = γ_i / γ_j (i ≥ j), Ã = A' diag(β) of `kkt_inverse`, S the
state before the chunk and dS the gradient of the state that leaves it:

    Y = V − diag(γ) K S      U = (Ã∘Γ) Y      Z = dV = (Ã∘Γ)ᵀ dU      dU = scale (tril(Q Kᵀ)∘Γ)ᵀ dO + diag(γ_C/γ) K dS
    S ← γ_C S + (diag(γ_C/γ) K)ᵀ U            dS ← γ_C dS + scale (diag(γ) Q)ᵀ dO − (diag(γ) K)ᵀ Z

E with U = diag(β) E takes the place of U in every gradient, so that nothing is ever divided by β.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .ragged import EqualChunks, cumulative_lengths, equal_chunks
from .reference import kkt_inverse_reference


@dataclass(frozen=True)
class _Chunks(EqualChunks):
    """Of every value head: rows of tokens as ``[n, HV, c, ...]``, and factors of their gates."""

    rows: dict[str, torch.Tensor]
    log_gamma: torch.Tensor  # [n, HV, c]

    @property
    def gamma(self) -> torch.Tensor:
        """γ, ``[n, HV, c, 1]``."""
        return self.log_gamma.exp()[..., None]

    @property
    def tail(self) -> torch.Tensor:
        """γ_C/γ, ``[n, HV, c, 1]``."""
        return (self.log_gamma[..., -1:] - self.log_gamma).exp()[..., None]

    @property
    def end(self) -> torch.Tensor:
        """γ_C, ``[n, HV, 1, 1]``."""
        return self.log_gamma[..., -1:, None].exp()

    @property
    def decay(self) -> torch.Tensor:
        """Γ, ``[n, HV, c, c]``."""
        return (self.log_gamma[..., :, None] - self.log_gamma[..., None, :]).tril().exp().tril()


def _chunks(
    cu: Sequence[int],
    chunk_size: int,
    g: torch.Tensor,
    walk: Literal["forward", "backward"] | None = None,
    **streams: torch.Tensor,
) -> Iterator[_Chunks]:
    """The chunks of a batch by `equal_chunks`; streams: ``[B, T, H or HV, ...]``, those of key heads repeated to value
    heads."""
    heads = g.shape[2]
    flat = {name: x.flatten(0, 1) for name, x in streams.items()}
    gates = g.flatten(0, 1)
    for at in equal_chunks(cu, chunk_size, g.device, walk):
        rows = {
            name: x[at.tokens].double().repeat_interleave(heads // x.shape[1], 2).transpose(1, 2)
            for name, x in flat.items()
        }
        log_gamma = gates[at.tokens].double().transpose(1, 2).cumsum(-1)
        yield _Chunks(at.sequences, at.slots, at.tokens, rows, log_gamma)


def _inverse(inverses: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
    """Ã∘Γ of chunks, ``[n, HV, c, c]``."""
    c = chunks.log_gamma.shape[-1]
    return inverses[chunks.slots, :, :c, :c] * chunks.decay


def recompute_state_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before every chunk, and ``E = U / β = Y − (tril(K Kᵀ, −1)∘Γ) U`` with ``Y = V − diag(γ) K S``.

    k: ``[B, T, H, K]``.  v: ``[B, T, HV, V]``.  g (log space), beta: ``[B, T, HV]``.  initial_state:
    ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first; zero if None.

    Returns float64: states ``[num_slots, HV, V, K]``, transposed and in the slot layout of `ragged`, 0 in slots that no
    chunk owns; effects ``[B, T, HV, V]``.
    """
    batch, tokens, heads, dim_v = v.shape
    cu = cumulative_lengths(batch, tokens, cu_seqlens)
    inverses = kkt_inverse_reference(k, beta, cu, chunk_size)
    states = inverses.new_zeros(len(inverses), heads, dim_v, k.shape[-1])
    effects = states.new_zeros(batch * tokens, heads, dim_v)
    walked = states.new_zeros(len(cu) - 1, heads, k.shape[-1], dim_v)  # the state so far, per sequence
    if initial_state is not None:
        walked = (initial_state.mT if state_v_first else initial_state).double().clone()
    for chunks in _chunks(cu, chunk_size, g, "forward", k=k, v=v):
        state, keys = walked[chunks.sequences], chunks.rows["k"]
        states[chunks.slots] = state.mT
        y = chunks.rows["v"] - chunks.gamma * (keys @ state)
        u = _inverse(inverses, chunks) @ y
        effects[chunks.tokens] = (y - ((keys @ keys.mT).tril(-1) * chunks.decay) @ u).transpose(1, 2)
        walked[chunks.sequences] = chunks.end * state + (chunks.tail * keys).mT @ u
    return states, effects.unflatten(0, (batch, tokens))


def backward_state_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor,
    scale: float | None = None,
    dfinal: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the state that leaves every chunk, of V, and of the initial state.

    q, k: ``[B, T, H, K]``.  g, beta: ``[B, T, HV]``.  do: gradient of o, ``[B, T, HV, V]``.  dfinal: gradient of the
    final state, ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with state_v_first; zero if None.

    Returns float64: dstates ``[num_slots, HV, V, K]``, transposed and in the slot layout, 0 in slots that no chunk
    owns; dv ``[B, T, HV, V]``; dinitial in the layout of dfinal.
    """
    batch, tokens, heads, dim_v = do.shape
    dim_k = k.shape[-1]
    scale = dim_k**-0.5 if scale is None else scale
    cu = cumulative_lengths(batch, tokens, cu_seqlens)
    inverses = kkt_inverse_reference(k, beta, cu, chunk_size)
    dstates = inverses.new_zeros(len(inverses), heads, dim_v, dim_k)
    dv = dstates.new_zeros(batch * tokens, heads, dim_v)
    gradients = dstates.new_zeros(len(cu) - 1, heads, dim_k, dim_v)  # of the state, so far, per sequence
    if dfinal is not None:
        gradients = (dfinal.mT if state_v_first else dfinal).double().clone()
    for chunks in _chunks(cu, chunk_size, g, "backward", q=q, k=k, do=do):
        dstate, queries, keys, dout = gradients[chunks.sequences], *(chunks.rows[name] for name in ("q", "k", "do"))
        dstates[chunks.slots] = dstate.mT
        scores = (queries @ keys.mT).tril() * chunks.decay
        du = scale * scores.mT @ dout + chunks.tail * (keys @ dstate)
        z = _inverse(inverses, chunks).mT @ du
        dv[chunks.tokens] = z.transpose(1, 2)
        dstate = chunks.end * dstate + scale * (chunks.gamma * queries).mT @ dout - (chunks.gamma * keys).mT @ z
        gradients[chunks.sequences] = dstate
    return dstates, dv.unflatten(0, (batch, tokens)), gradients.mT.contiguous() if state_v_first else gradients


def backward_grad_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    effects: torch.Tensor,
    dstates: torch.Tensor,
    dv: torch.Tensor,
    do: torch.Tensor,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, beta and g from what the other two kernels leave, each chunk by itself.

    With ``D₁ = dO Eᵀ``, ``D₂ = Z Eᵀ`` and ``κ = tril(K Kᵀ, −1)∘Γ``::

        dP = scale tril(D₁)∘Γ∘β_col         W = −tril(D₂, −1)∘Γ∘β_col        X = scale tril(Q Kᵀ)∘Γ∘D₁ − κ∘D₂
        dQ = scale diag(γ) dO Sᵀ + dP K      dK = dPᵀ Q + diag(β γ_C/γ) E dSᵀ − diag(γ) Z Sᵀ + (W + Wᵀ) K
        dβ = colsum(X) + κ'                  κ' = γ_C/γ rowdot(K, E dSᵀ)
        d log γ = rowdot(Q, scale γ dO Sᵀ) − γ rowdot(K, Z Sᵀ) − β κ' + rowsum(M) − colsum(M),  M = tril(X diag(β), −1)

    the chunk's last token also gets ``γ_C ⟨S, dS⟩ + Σ β κ'``, and dg is the reverse cumulative sum in the chunk.  M has
    no diagonal because it would enter both sums and cancel.

    q, k: ``[B, T, H, K]``.  g (log space), beta: ``[B, T, HV]``.  states, effects: of `recompute_state_reference`.
    dstates, dv: of `backward_state_reference`.  do: ``[B, T, HV, V]``.

    Returns float64 dq, dk ``[B, T, H, K]``, summed over the value heads of a key head, and dbeta, dg ``[B, T, HV]``.
    """
    batch, tokens, key_heads, dim_k = q.shape
    heads = g.shape[2]
    scale = dim_k**-0.5 if scale is None else scale
    cu = cumulative_lengths(batch, tokens, cu_seqlens)
    rows = batch * tokens
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=q.device)
    dq, dk = (zeros(rows, heads, dim_k) for _ in range(2))
    dbeta, dg = (zeros(rows, heads) for _ in range(2))
    for chunks in _chunks(cu, chunk_size, g, q=q, k=k, beta=beta[..., None], e=effects, z=dv, do=do):
        queries, keys, b, e, z, dout = (chunks.rows[name] for name in ("q", "k", "beta", "e", "z", "do"))
        state, dstate = states[chunks.slots].double(), dstates[chunks.slots].double()  # transposed: [n, HV, V, K]
        gamma, decay = chunks.gamma, chunks.decay
        overlap = (keys @ keys.mT).tril(-1) * decay
        d1, d2 = dout @ e.mT, z @ e.mT
        dp = scale * d1 * decay * b.mT
        w = -(d2.tril(-1) * decay * b.mT)
        x = scale * (queries @ keys.mT) * decay * d1 - overlap * d2
        of_state, of_residual, of_dstate = (
            scale * gamma * (dout @ state),
            gamma * (z @ state),
            chunks.tail * (e @ dstate),
        )
        dq[chunks.tokens] = (of_state + dp @ keys).transpose(1, 2)
        dk[chunks.tokens] = (dp.mT @ queries + b * of_dstate - of_residual + (w + w.mT) @ keys).transpose(1, 2)
        left = (keys * of_dstate).sum(-1)
        dbeta[chunks.tokens] = (x.sum(-2) + left).mT
        m = (x * b.mT).tril(-1)
        kept = left * b[..., 0]
        dlog = (queries * of_state).sum(-1) - (keys * of_residual).sum(-1) - kept + m.sum(-1) - m.sum(-2)
        dlog[..., -1] += chunks.end[..., 0, 0] * (state * dstate).sum((-1, -2)) + kept.sum(-1)
        dg[chunks.tokens] = dlog.flip(-1).cumsum(-1).flip(-1).mT
    shape = (batch, tokens)
    dq, dk = (x.unflatten(1, (key_heads, -1)).sum(2).unflatten(0, shape) for x in (dq, dk))
    return dq, dk, dbeta.unflatten(0, shape), dg.unflatten(0, shape)


def backward_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    dfinal: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, ...]:
    """The three kernels one after another: gradients of q, k, v, g, beta and the initial state; arguments as above."""
    layout = dict(cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    states, effects = recompute_state_reference(k, v, g, beta, initial_state, state_v_first=state_v_first, **layout)
    dstates, dv, dinitial = backward_state_reference(
        q, k, g, beta, do, scale, dfinal, state_v_first=state_v_first, **layout
    )
    dq, dk, dbeta, dg = backward_grad_reference(q, k, g, beta, states, effects, dstates, dv, do, scale, **layout)
    return dq, dk, dv, dg, dbeta, dinitial
