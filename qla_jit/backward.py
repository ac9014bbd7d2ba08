"""`compile_backward(OpConfig) -> CompiledBackward`: the kernels of the backward, launched in order.

| kernel            | leaves                                                                                  |
| ----------------- | --------------------------------------------------------------------------------------- |
| `kkt_inverse`     | Ã and the gates of every chunk, made again instead of being kept from the forward         |
| `recompute_state` | the state before every chunk, and Y = V − diag(γ) K S                                   |
| `backward_state`  | the gradient of the state that leaves every chunk, of V and of the initial state        |
| `backward_grad`   | the gradients of q, k, beta and g, chunk by chunk                                       |

Nothing is saved by the forward but its inputs.  Work memory per value head and chunk of 64 tokens, at K = V = 128 in
16 bits: 64 KB of states and their gradients, 16 KB of Y, 8 KB of Ã.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from . import device_indices, env, launch
from .artifacts import ArtifactStore
from .config import BACKWARD_KERNELS, OpConfig
from .db import Database, open_db
from .op import Loader
from .ragged import num_slots
from .schedule import Schedule
from .spec import KernelSpec
from .split_backward import SplitBackward

#: In the order of their launches.
KERNELS = ("kkt_inverse", *BACKWARD_KERNELS)


class Gradients(NamedTuple):
    """Of q, k ``[T, H, K]`` and v ``[T, HV, V]`` in their dtype; of g, beta ``[T, HV]`` fp32; of the initial state."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None


class CompiledBackward:
    """The backward of one `OpConfig`: takes CUDA tensors, launches on torch's current stream, never synchronises."""

    def __init__(self, config: OpConfig, entries: Mapping[str, Callable[..., None]]):
        """entries: of `KERNELS`, by name."""
        self.config = config
        self._inverse, self._recompute, self._state, self._grad = (entries[name] for name in KERNELS)
        self._problem = config.problem("backward_state")
        self._state_dtype = launch.torch_dtype(config.state_dtype)
        self._absent: dict[torch.device, torch.Tensor] = {}

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
        split: SplitBackward | None = None,
    ) -> Gradients:
        """Gradients for dO and, if given, the gradient of the final states; arguments are not checked.

        q, k ``[T, H, K]``, v, do ``[T, HV, V]`` in the config's dtype; g, beta ``[T, HV]`` fp32; bounds ``[N + 1]``
        int32; initial_state and dfinal in the config's layout and state_dtype.  All contiguous.  split: how the
        sequences are cut, None for whole ones.  Rows of tokens that belong to no sequence get no gradient: what they
        hold afterwards is unspecified.
        """
        device, dtype, (tokens, heads, dim_v) = q.device, v.dtype, v.shape
        sequences, dim_k = bounds.shape[0] - 1, k.shape[-1]
        c = self._problem.chunk_size
        slots = num_slots(tokens, sequences, c)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        a, log_gates = empty(slots, heads, c, c), empty(slots, heads, c, dtype=torch.float32)
        states, dstates = empty(slots, heads, dim_v, dim_k), empty(slots, heads, dim_v, dim_k)
        residuals, dv, dq, dk = (torch.empty_like(x) for x in (v, v, q, k))
        dg, dbeta = (empty(tokens, heads, dtype=torch.float32) for _ in range(2))
        absent = self._absent_state(device)
        dinitial = absent
        if needs_dinitial:
            shape = launch.state_shape(self._problem, sequences)
            dinitial = empty(*shape, dtype=self._state_dtype)
        initial, has_initial = (absent, 0) if initial_state is None else (initial_state, 1)
        final, has_dfinal = (absent, 0) if dfinal is None else (dfinal, 1)
        self._inverse(k, beta, g, bounds, a, log_gates)
        if split is None:
            self._recompute(k, v, a, log_gates, bounds, initial, states, residuals, has_initial)
            self._state(
                q, k, do, a, log_gates, bounds, final, dinitial, dstates, dv, scale, has_dfinal, int(needs_dinitial)
            )
        else:
            split(
                q, k, v, do, a, log_gates, bounds, device_indices.ramp(sequences, device), initial, final, dinitial,
                states, residuals, dstates, dv, scale, has_initial, has_dfinal, int(needs_dinitial),
            )  # fmt: skip
        self._grad(q, k, beta, a, log_gates, bounds, states, residuals, dstates, dv, do, dq, dk, dbeta, dg, scale)
        return Gradients(dq, dk, dv, dg, dbeta, dinitial if needs_dinitial else None)

    def _absent_state(self, device: torch.device) -> torch.Tensor:
        """A tensor to pass where a state is absent; the kernels do not touch it."""
        if device not in self._absent:
            shape = launch.state_shape(self._problem, 1)
            self._absent[device] = torch.empty(shape, dtype=self._state_dtype, device=device)
        return self._absent[device]


def compile_backward(
    config: OpConfig,
    db: Database | None = None,
    store: ArtifactStore | None = None,
    schedules: Mapping[str, Schedule] | None = None,
    strict: bool | None = None,
) -> CompiledBackward:
    """Choose, build or load the kernels of the backward of ``config``.

    Arguments and errors as of `op.compile`; UnsupportedError too where no template answers a kernel.
    """
    db = open_db() if db is None else db
    load = Loader(ArtifactStore() if store is None else store, env.strict() if strict is None else strict)
    entries = {}
    for name in KERNELS:
        problem = config.problem(name)
        match = None if schedules and name in schedules else db.lookup(problem)
        entries[name] = load(KernelSpec(problem, schedules[name] if match is None else match.schedule), match).entry
    return CompiledBackward(config, entries)
