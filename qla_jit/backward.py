"""`compile_backward(OpConfig) -> CompiledBackward`: the kernels of the backward, launched in order.

| kernel            | leaves                                                                                  |
| ----------------- | --------------------------------------------------------------------------------------- |
| `kkt_inverse`     | Ã and the gates of every chunk, made again instead of being kept from the forward         |
| `recompute_state` | the state before every chunk, and E = Y − (tril(K Kᵀ, −1) Ã∘Γ) Y, Y = V − diag(γ) K S     |
| `backward_state`  | the gradient of the state that leaves every chunk, of V and of the initial state        |
| `backward_grad`   | the gradients of q, k, beta and g, chunk by chunk                                       |

Where `split_plan` says so, sequences are cut and `split_backward` takes the place of the two in the middle.

Nothing is saved by the forward but its inputs.  Work memory per value head and chunk of 64 tokens, at K = V = 128 in
16 bits: 64 KB of states and their gradients, 16 KB of E, 8 KB of Ã.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from . import device_indices, env, launch
from .artifacts import ArtifactStore
from .config import BACKWARD, OpConfig
from .db import Database, open_db
from .handles import PerThread
from .op import Loader, explained
from .planned import SplitPlan
from .prepared_backward import Arguments, Gradients, PreparedBackward, Walks, intermediates
from .schedule import Schedule
from .segments import EXACT
from .spec import KernelSpec
from .split import cut_batch
from .split_backward import SplitBackward
from .split_models import SplitModels
from .split_plan import plan_split

#: In the order of their launches where nothing is cut.
KERNELS = (*BACKWARD.before, *BACKWARD.whole, *BACKWARD.after)
_MAX_CACHED_CHOICES = 1024


class CompiledBackward:
    """The backward of one `OpConfig`: takes CUDA tensors, launches on torch's current stream, never synchronises."""

    def __init__(
        self,
        config: OpConfig,
        entries: Mapping[str, Callable[..., None]],
        models: SplitModels | None = None,
        load: Callable[[str, Schedule], Callable[..., None]] | None = None,
    ):
        """entries: of `KERNELS`, by name.

        models: what `choose` decides by, and load: the entry of a kernel by name and schedule; without them every call
        runs ``entries``.
        """
        self.config = config
        self._inverse, self._grad = entries["kkt_inverse"], entries["backward_grad"]
        self._walks = Walks(*(entries[name] for name in BACKWARD.whole))
        self._models, self._load = models, load
        self._chosen: dict[tuple, Walks | SplitBackward] = {}
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
        walks: Walks | SplitBackward | None = None,
    ) -> Gradients:
        """Gradients for dO and, if given, the gradient of the final states; arguments are not checked.

        q, k ``[T, H, K]``, v, do ``[T, HV, V]`` in the config's dtype; g, beta ``[T, HV]`` fp32; bounds ``[N + 1]``
        int32; initial_state and dfinal in the config's layout and state_dtype.  All contiguous.  walks: what `choose`
        answered for the lengths; whole sequences by the preferred schedules if None.  Rows of tokens that belong to no
        sequence get no gradient: what they hold afterwards is unspecified.
        """
        prepared = self.prepare(q.shape[0], bounds.shape[0] - 1, q.device, walks or self._walks)
        return prepared(q, k, v, g, beta, bounds, scale, do, initial_state, dfinal, needs_dinitial)

    def prepare(
        self, num_tokens: int, num_sequences: int, device: torch.device, walks: Walks | SplitBackward
    ) -> PreparedBackward:
        """What backwards of this size share.  walks: what `choose` answered."""
        problem, scratch = self._problem, walks.scratch if isinstance(walks, SplitBackward) else ()
        layout = intermediates(problem, num_tokens, num_sequences) + scratch
        return PreparedBackward(
            kkt_inverse=self._inverse,
            walks=walks,
            backward_grad=self._grad,
            arguments=PerThread(lambda: Arguments(problem, num_tokens, layout, device)),
            state_shape=launch.state_shape(problem, num_sequences),
            absent=self._absent_state(device),
            state_rows=device_indices.ramp(num_sequences, device),
        )

    def choose(
        self,
        cu_host: tuple[int, ...] | None,
        device: torch.device,
        may_split: bool = False,
        window: str | float = EXACT,
        window_share: float | None = None,
    ) -> Walks | SplitBackward:
        """What to launch for these lengths between the first kernel and the last: what is predicted to take least.

        Arguments as of `CompiledOp.choose`; with lengths unknown to the host, or unless ``may_split``, the preferred
        schedules on whole sequences.  Kept per content.  While a CUDA graph is captured nothing is chosen anew.
        """
        if not may_split or cu_host is None or self._models is None or not self._models.can_split:
            return self._walks
        key = cu_host, device, window, window_share
        found = self._chosen.get(key)
        if found is None:
            if device_indices.is_capturing(device):
                return self._walks
            sm_count = torch.cuda.get_device_properties(device).multi_processor_count
            lengths = [end - start for start, end in zip(cu_host, cu_host[1:])]
            found = self._planned(
                plan_split(self._models, lengths, sm_count, window, window_share), lengths, device, window
            )
            if len(self._chosen) >= _MAX_CACHED_CHOICES:
                self._chosen.clear()
            self._chosen[key] = found
        return found

    def _planned(
        self, planned: SplitPlan, lengths: Sequence[int], device: torch.device, window: str | float
    ) -> Walks | SplitBackward:
        if planned.segment_chunks is None:
            return self.whole(planned.schedules)
        return self.split(lengths, planned.segment_chunks, device, window, planned.schedules)

    def whole(self, schedules: Mapping[str, Schedule]) -> Walks:
        """Whole sequences, by schedules of ``BACKWARD.whole``, by name, that a plan may choose."""
        return Walks(*(self._load(name, schedules[name]) for name in BACKWARD.whole))

    def split(
        self,
        lengths: Sequence[int],
        segment_chunks: int,
        device: torch.device,
        window: str | float,
        schedules: Mapping[str, Schedule],
    ) -> SplitBackward:
        """Sequences of ``lengths`` tokens cut into segments of at most ``segment_chunks`` chunks.

        window: "exact", or the factor in (0, 1) by which what is dropped may still count.  schedules: of
        ``BACKWARD.split``, by name, that a plan may choose.
        """
        entries = {name: self._load(name, schedules[name]) for name in BACKWARD.split}
        segments = cut_batch(self.config.problem("segment_backward"), lengths, segment_chunks)
        return SplitBackward(entries, segments, self.config.num_value_heads, window, device)

    def explain(
        self,
        lengths: Sequence[int],
        window: str | float = EXACT,
        window_share: float | None = None,
        sm_count: int | None = None,
    ) -> str:
        """The plan of the backward as text; arguments as of `CompiledOp.explain`."""
        if self._models is None:
            return "whole sequences: the caller gave the schedules"
        return explained(self._models, lengths, window, window_share, sm_count)

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
    """Choose, build or load the kernels of the backward of ``config``, those that a plan may choose too.

    Arguments and errors as of `op.compile`; UnsupportedError too where no template answers a kernel.
    """
    db = open_db() if db is None else db
    load = Loader(ArtifactStore() if store is None else store, env.strict() if strict is None else strict)
    matches = {name: db.lookup(config.problem(name)) for name in KERNELS if name not in (schedules or {})}
    chosen = {name: matches[name].schedule if name in matches else schedules[name] for name in KERNELS}
    models = None if schedules else SplitModels.of(config, db, kernels=BACKWARD)
    entries = {
        spec: load(spec, matches.get(spec.problem.kernel)).entry for spec in kernel_specs(config, chosen, models)
    }
    of_kernel = {name: entries[KernelSpec(config.problem(name), schedule)] for name, schedule in chosen.items()}
    by_schedule = lambda name, schedule: entries[KernelSpec(config.problem(name), schedule)]
    return CompiledBackward(config, of_kernel, models, by_schedule)


def kernel_specs(config: OpConfig, chosen: Mapping[str, Schedule], models: SplitModels | None) -> Iterable[KernelSpec]:
    """Every kernel that a backward can launch: those of ``chosen``, and what its plan may choose."""
    found = dict.fromkeys(KernelSpec(config.problem(name), schedule) for name, schedule in chosen.items())
    if models is not None and models.can_split:
        for name in (*BACKWARD.whole, *BACKWARD.split):
            found |= dict.fromkeys(KernelSpec(config.problem(name), o.schedule) for o in models.options[name])
    return found
