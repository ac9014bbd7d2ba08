"""The forward kernels of an operator in launch order, with what calls of one size share worked out ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .activation import Activation, ActivationKernel, Modes
from .workspace import Layout, Workspace, take_kept


@dataclass(frozen=True)
class Checkpoints:
    """States after every ``every`` tokens of each sequence, a multiple of the chunk size.

    states: ``[rows, HV, K, V]`` in the config's layout and state_dtype.  rows: ``[N]`` int32, each sequence's first.
    """

    every: int
    states: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """Calls that agree in tokens, sequences, device, and in what is launched for them.

    kkt_inverse: an entry.  forward: one of `fused_forward`, or a `SplitForward`.  activation, modes: what is done to
    the inputs first, if anything is.
    layout: of the intermediates: ``num_scratch`` tensors of a split, ``a``, ``log_gates``, and what the activation
    writes.  is_small: they may be kept for later calls of the thread and stream (`workspace.take_kept`).
    state_shape: of N states.  absent: a tensor to pass where a state is absent; no kernel touches it.
    state_rows: ``[N]`` int32, for states in the order of the sequences.
    """

    kkt_inverse: Callable[..., None]
    forward: Callable[..., None]
    activation: ActivationKernel | None
    modes: Modes | None
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
        `CompiledOp`.
        """
        taken = self._intermediates(workspace)
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
            q, k, g, beta = self.activation(activation, self.modes, activated, q, k, g, beta)
        self.kkt_inverse(k, beta, g, bounds, a, log_gates)
        self.forward(
            q, k, v, a, log_gates, bounds, state_rows, checkpoint_rows,
            absent if initial_state is None else initial_state, final, states, out,
            self.default_scale if scale is None else scale, int(initial_state is not None), int(output_final_state),
            every, *scratch,
        )  # fmt: skip
        return out, final if output_final_state else None

    def _intermediates(self, workspace: Workspace | None) -> tuple[torch.Tensor, ...]:
        if workspace is not None:
            return workspace.take(self.layout, self.device)
        kept = take_kept(self.layout, self.device) if self.is_small else None
        if kept is not None:
            return kept
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.layout)
