"""Ragged batches as chunks: the slot layout of kernel intermediates, and the order in which torch code walks chunks.

Everything is a function of ``cu`` (cumulative sequence lengths on the host, ``len(cu) == N + 1``), never of a device
tensor.  Only the tensors of `EqualChunks` and `ChunkSteps` live on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

CHUNKS_AT_ONCE = 64  # of those that do not wait for each other


def cumulative_lengths(batch: int, tokens: int, cu_seqlens: Sequence[int] | None) -> list[int]:
    """`cu_seqlens` itself, or the cumulative lengths of `batch` sequences of `tokens` tokens laid end to end."""
    if cu_seqlens is not None:
        return [int(c) for c in cu_seqlens]
    return [n * tokens for n in range(batch + 1)]


def num_slots(num_tokens: int, num_sequences: int, chunk_size: int) -> int:
    """Slots that per-chunk data of a batch is allocated with: never fewer than its chunks, whatever the lengths."""
    return num_tokens // chunk_size + num_sequences


def _slots_of(sequence: int, start: int, end: int, chunk_size: int) -> list[tuple[int, int, int]]:
    slot = start // chunk_size + sequence
    firsts = range(start, end, chunk_size)
    return [(slot + c, first, min(first + chunk_size, end)) for c, first in enumerate(firsts)]


def chunk_slots(cu: Sequence[int], chunk_size: int) -> list[tuple[int, int, int]]:
    """(slot, first token, end token) of every chunk; chunk c of sequence n sits in slot ``cu[n] // C + n + c``."""
    bounds = enumerate(zip(cu, cu[1:]))
    return [chunk for n, (start, end) in bounds for chunk in _slots_of(n, start, end, chunk_size)]


@dataclass(frozen=True)
class EqualChunks:
    """n chunks of c tokens each.  sequences, slots: ``[n]``.  tokens: ``[n, c]``, rows of the flattened tokens."""

    sequences: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor


def equal_chunks(
    cu: Sequence[int], chunk_size: int, device: torch.device, walk: Literal["forward", "backward"] | None = None
) -> Iterator[EqualChunks]:
    """All chunks, those of equally many tokens together, `CHUNKS_AT_ONCE` at most.

    walk: no two chunks of a sequence together, and one after the other, from its start or from its end.
    """
    together: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for n, (start, end) in enumerate(zip(cu, cu[1:])):
        for c, (slot, first, last) in enumerate(_slots_of(n, start, end, chunk_size)):
            together.setdefault((c if walk else 0, last - first), []).append((n, slot, first))
    for (_, length), found in sorted(together.items(), reverse=walk == "backward"):
        for part in range(0, len(found), CHUNKS_AT_ONCE):
            sequences, slots, firsts = torch.tensor(found[part : part + CHUNKS_AT_ONCE], device=device).T
            yield EqualChunks(sequences, slots, firsts[:, None] + torch.arange(length, device=device))


def num_checkpoints(cu: Sequence[int], every: int) -> int:
    """States kept after every ``every`` tokens of each sequence; a last interval that is not whole keeps none."""
    return sum((end - start) // every for start, end in zip(cu, cu[1:]))


@dataclass(frozen=True)
class ChunkSteps:
    """The chunks of some sequences in the order a recurrence visits them: by chunk index, longest sequence first.

    sequences: their numbers, longest first.  active[c]: how many of them, from the front, have a chunk c.
    tokens: ``[chunks, C]`` int64, the row of each position in the flattened token dimension (0 where absent).
    present: ``[chunks, C]`` bool, False past the end of a sequence.
    """

    sequences: tuple[int, ...]
    active: tuple[int, ...]
    tokens: torch.Tensor
    present: torch.Tensor

    @classmethod
    def of(
        cls, cu: Sequence[int], chunk_size: int, device: torch.device, sequences: Sequence[int] | None = None
    ) -> ChunkSteps:
        """Steps of the named sequences (all by default); ``cu`` as above."""
        chosen = range(len(cu) - 1) if sequences is None else sequences
        order = sorted(chosen, key=lambda n: cu[n] - cu[n + 1])
        counts = [-((cu[n] - cu[n + 1]) // chunk_size) for n in order]
        active, firsts, ends, alive = [], [], [], len(order)
        for c in range(counts[0] if counts else 0):
            while counts[alive - 1] <= c:
                alive -= 1
            active.append(alive)
            firsts.extend(cu[n] + c * chunk_size for n in order[:alive])
            ends.extend(cu[n + 1] for n in order[:alive])
        first, end = (torch.tensor(x, dtype=torch.int64, device=device)[:, None] for x in (firsts, ends))
        tokens = first + torch.arange(chunk_size, device=device)
        present = tokens < end
        return cls(tuple(order), tuple(active), tokens.where(present, 0), present)

    def scan(
        self, step: Callable[..., tuple[torch.Tensor, torch.Tensor]], state: torch.Tensor, *streams: Sequence
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run ``step(state, *inputs) -> (out, state)`` over the steps; a sequence leaves when it has no chunk left.

        state: ``[len(sequences), ...]`` in the order of ``sequences``, as is the final state returned.
        """
        outs, finished = [], []
        for count, *inputs in zip(self.active, *streams):
            if count < state.shape[0]:
                # Cloned: a view would keep the states of all sequences alive for every sequence that ends.
                finished.append(state[count:].clone())
                state = state[:count]
            out, state = step(state, *inputs)
            outs.append(out)
        return outs, torch.cat([state, *reversed(finished)])


def gather_rows(all_steps: Sequence[ChunkSteps], x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """``[T, ...]`` rows, for each `ChunkSteps` as one ``[active, C, ...]`` tensor per step; absent positions are 0.

    All rows are taken at once and then split: one gather per step would cost a full-size gradient per step.
    """
    if not all_steps:
        return []
    present = torch.cat([steps.present.flatten() for steps in all_steps])
    rows = x.index_select(0, torch.cat([steps.tokens.flatten() for steps in all_steps]))
    # A select, not a product: the row of an absent position may hold NaN.
    rows = rows.where(present.view(-1, *(1,) * (x.dim() - 1)), torch.zeros((), dtype=x.dtype, device=x.device))
    parts = rows.split([steps.tokens.numel() for steps in all_steps])
    return [part.unflatten(0, steps.tokens.shape).split(steps.active) for steps, part in zip(all_steps, parts)]


def scatter_rows(parts: Sequence[tuple[ChunkSteps, list[torch.Tensor]]], num_tokens: int, like: torch.Tensor):
    """Per-step outputs ``[active, C, ...]`` of several `ChunkSteps` back as ``[num_tokens, ...]``; other rows are 0."""
    out = like.new_zeros(num_tokens, *like.shape)
    rows = [torch.cat(outs)[steps.present] for steps, outs in parts if outs]
    if not rows:
        return out
    tokens = torch.cat([steps.tokens[steps.present] for steps, outs in parts if outs])
    return out.index_copy(0, tokens, torch.cat(rows).to(out.dtype))


def restore_order(states: Sequence[torch.Tensor], sequences: Sequence[int]) -> torch.Tensor:
    """States of ``sequences``, concatenated, back in the order 0, 1, 2 …"""
    joined = torch.cat(list(states))
    inverse = torch.empty(len(sequences), dtype=torch.int64)
    inverse[torch.tensor(sequences, dtype=torch.int64)] = torch.arange(len(sequences))
    return joined.index_select(0, inverse.to(joined.device))
