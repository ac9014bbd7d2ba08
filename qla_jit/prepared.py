"""The forward kernels of an operator in launch order, with what calls of one size share worked out ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .activation import Activation, ActivationKernel, Modes, aligned
from .config import Problem
from .handles import Block, PerThread, handle
from .launch import torch_dtype
from .workspace import Layout, Workspace, take_kept


@dataclass(frozen=True)
class Checkpoints:
    """States after every ``every`` tokens of each sequence, a multiple of the chunk size.

    states: ``[rows, HV, K, V]`` in the config's layout and state_dtype.  rows: ``[N]`` int32, each sequence's first.
    """

    every: int
    states: torch.Tensor
    rows: torch.Tensor


class Arguments:
    """Of one thread's calls: handles of q, k, v, g, beta and o, and the intermediates where they are not kept."""

    def __init__(self, problem: Problem, gates: tuple, num_tokens: int, layout: Layout, device: torch.device):
        """problem: of `fused_forward`.  gates: dtypes of g and beta."""
        heads, value_heads = problem.num_heads, problem.num_value_heads
        dtype = torch_dtype(problem.dtype)
        keys, values = (num_tokens, heads, problem.head_dim_k), (num_tokens, value_heads, problem.head_dim_v)
        self.q, self.k = handle(keys, dtype, device), handle(keys, dtype, device)
        self.v, self.o = handle(values, dtype, device), handle(values, dtype, device)
        self.g, self.beta = (handle(values[:2], gate, device) for gate in gates)
        self.block = Block(layout, device)


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """Calls that agree in tokens, sequences, device, and in what is launched for them.

    kkt_inverse: an entry.  forward: one of `fused_forward`, or a `SplitForward`.  activation, modes: what is done to
    the inputs first, if anything is.
    arguments: the thread's `Arguments`.
    layout: of the intermediates: ``num_scratch`` tensors of a split, ``a``, ``log_gates``, and what the activation
    writes.  is_small: they may be kept for later calls of the thread and stream (`workspace.take_kept`).
    state_shape: of N states.  absent: a tensor to pass where a state is absent; no kernel touches it.
    state_rows: ``[N]`` int32, for states in the order of the sequences.
    """

    kkt_inverse: Callable[..., None]
    forward: Callable[..., None]
    activation: ActivationKernel | None
    modes: Modes | None
    arguments: PerThread
    device: torch.device
    layout: Layout
    num_scratch: int
    is_small: bool
    chunk_size: int
    default_scale: float
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
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        out: torch.Tensor | None = None,
        state_rows: torch.Tensor | None = None,
        final_state_out: torch.Tensor | None = None,
        checkpoints: Checkpoints | None = None,
        workspace: Workspace | None = None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch the kernels on torch's current stream, which is one of ``device``; arguments and results as of
        `CompiledOp`, but q, k, v, g, beta and o in any shape of as many tokens.
        """
        at = self.arguments.value
        memory, taken = self._intermediates(at, workspace)  # memory stays until everything is launched
        scratch, (a, log_gates, *activated) = taken[: self.num_scratch], taken[self.num_scratch :]
        if out is None:
            out = torch.empty_like(v)
        absent = self.absent
        if not output_final_state:
            final = absent
        elif state_rows is not None:
            final = initial_state
        elif final_state_out is not None:
            final = final_state_out
        elif initial_state is not None:
            final = torch.empty_like(initial_state)
        else:
            final = absent.new_empty(self.state_shape)
        if state_rows is None:
            state_rows = self.state_rows
        if checkpoints is None:
            checkpoint_rows, states, every = state_rows, absent, 0
        else:
            checkpoint_rows, states, every = checkpoints.rows, checkpoints.states, checkpoints.every // self.chunk_size
        if activation is not None:
            g, beta = aligned(g), aligned(beta)
        tokens = at.q(q), at.k(k), at.g(g), at.beta(beta)
        if activation is not None:
            tokens = self.activation(activation, self.modes, activated, *tokens, self.device)
        q_in, k_in, g_in, beta_in = tokens
        self.kkt_inverse(k_in, beta_in, g_in, bounds, a, log_gates)
        self.forward(
            q_in, k_in, at.v(v), a, log_gates, bounds, state_rows, checkpoint_rows,
            absent if initial_state is None else initial_state, final, states, at.o(out),
            self.default_scale if scale is None else scale, int(initial_state is not None), int(output_final_state),
            every, *scratch,
        )  # fmt: skip
        return out, final if output_final_state else None

    def _intermediates(self, at: Arguments, workspace: Workspace | None) -> tuple[torch.Tensor | None, tuple]:
        """(memory to hold until all is launched, what kernels take for each tensor of ``layout``)."""
        if workspace is not None:
            return None, workspace.take(self.layout, self.device)
        kept = take_kept(self.layout, self.device) if self.is_small else None
        return at.block.allocate() if kept is None else (None, kept)
