"""The kernels of a backward in launch order, with what backwards of one size share worked out ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import workspace
from .config import Problem
from .handles import Block, PerThread, handle
from .launch import torch_dtype
from .ragged import num_slots
from .split_backward import SplitBackward
from .workspace import Layout


class Gradients(NamedTuple):
    """Of q, k, v, g and beta in their shapes and dtypes, g and beta in fp32; of the initial state."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None


class Walks(NamedTuple):
    """What runs between `kkt_inverse` and `backward_grad` on whole sequences: entries of the two kernels."""

    recompute_state: Callable[..., None]
    backward_state: Callable[..., None]


def intermediates(problem: Problem, num_tokens: int, num_sequences: int) -> Layout:
    """``a``, ``log_gates``, ``states``, ``dstates`` and ``effects`` (`launch`); problem: of `backward_state`."""
    dtype, heads = torch_dtype(problem.dtype), problem.num_value_heads
    slots = num_slots(num_tokens, num_sequences, problem.chunk_size)
    states = (slots, heads, problem.head_dim_v, problem.head_dim_k), dtype
    effects = (num_tokens, heads, problem.head_dim_v), dtype
    return (*workspace.intermediates(problem, num_tokens, num_sequences), states, states, effects)


class Arguments:
    """Of one thread's backwards: handles of tensors by token and of their gradients, and the intermediates."""

    def __init__(self, problem: Problem, num_tokens: int, layout: Layout, device: torch.device):
        """problem: of `backward_state`."""
        heads, value_heads = problem.num_heads, problem.num_value_heads
        rows = lambda *dims: handle((num_tokens, *dims), torch_dtype(problem.dtype), device)
        gates = lambda: handle((num_tokens, value_heads), torch.float32, device)
        self.q, self.k, self.dq, self.dk = (rows(heads, problem.head_dim_k) for _ in range(4))
        self.v, self.do, self.dv = (rows(value_heads, problem.head_dim_v) for _ in range(3))
        self.g, self.beta, self.dg, self.dbeta = (gates() for _ in range(4))
        self.block = Block(layout, device)


@dataclass(frozen=True, eq=False)
class PreparedBackward:
    """Backwards that agree in tokens, sequences, device, and in what is launched for them.

    kkt_inverse, backward_grad: entries.  walks: what runs between them.  arguments: the thread's `Arguments`.
    state_shape: of N states.  absent: a tensor to pass where a state is absent; no kernel touches it.
    state_rows: ``[N]`` int32, 0 … N − 1.
    """

    kkt_inverse: Callable[..., None]
    walks: Walks | SplitBackward
    backward_grad: Callable[..., None]
    arguments: PerThread
    state_shape: tuple[int, ...]
    absent: torch.Tensor
    state_rows: torch.Tensor

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        bounds: torch.Tensor,
        scale: float,
        do: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        dfinal: torch.Tensor | None = None,
        needs_dinitial: bool = False,
    ) -> Gradients:
        """Launch the kernels on torch's current stream; arguments as of `CompiledBackward`, but tensors by token in any
        shape of as many tokens."""
        at, walks, absent = self.arguments.value, self.walks, self.absent
        memory, (a, log_gates, states, dstates, effects, *scratch) = at.block.allocate()  # kept until all is launched
        q_in, k_in, v_in, beta_in, do_in = at.q(q), at.k(k), at.v(v), at.beta(beta), at.do(do)
        self.kkt_inverse(k_in, beta_in, at.g(g), bounds, a, log_gates)
        # What later kernels write is allocated from here on, while the card is at work.
        initial, has_initial = (absent, 0) if initial_state is None else (initial_state, 1)
        final, has_dfinal = (absent, 0) if dfinal is None else (dfinal, 1)
        dv, dinitial = torch.empty_like(v), absent
        if needs_dinitial:
            dinitial = absent.new_empty(self.state_shape)
        dv_out = at.dv(dv)
        if isinstance(walks, Walks):
            walks.recompute_state(k_in, v_in, a, log_gates, bounds, initial, states, effects, has_initial)
            walks.backward_state(
                q_in, k_in, do_in, a, log_gates, bounds, final, dinitial, dstates, dv_out, scale, has_dfinal,
                int(needs_dinitial),
            )  # fmt: skip
        else:
            walks(
                q_in, k_in, v_in, do_in, a, log_gates, bounds, self.state_rows, initial, final, dinitial, states,
                effects, dstates, dv_out, scale, has_initial, has_dfinal, int(needs_dinitial), *scratch,
            )  # fmt: skip
        dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
        self.backward_grad(
            q_in, k_in, beta_in, log_gates, bounds, states, effects, dstates, dv_out, do_in, at.dq(dq), at.dk(dk),
            at.dbeta(dbeta), at.dg(dg), scale,
        )  # fmt: skip
        return Gradients(dq, dk, dv, dg, dbeta, dinitial if needs_dinitial else None)
