"""`compile(OpConfig) -> CompiledOp`: look the schedules up, build or load the kernels, and run them in order.

The choice is a pure function of the config and the databases: never a search, never a device query.  Kernels come from
the artifact store; what is missing is built at `compile` time, or refused in strict mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from . import build, device_indices, env, launch, plan, runtime
from .activation import Activation, ActivationKernel, Modes
from .artifacts import Artifact, ArtifactStore
from .config import CHUNK_SIZES, DEFAULT_CHUNK_SIZE, FORWARD_KERNELS, SPLIT_KERNELS, OpConfig
from .db import Database, Match, open_db
from .errors import InputError, KernelMissingError, UnsupportedError
from .handles import PerThread
from .planned import describe
from .prepared import Arguments, Checkpoints, PreparedCall
from .schedule import Schedule
from .spec import KernelSpec
from .split import EXACT, SplitForward, cut_batch
from .split_models import SplitModels
from .split_plan import plan_split
from .workspace import MAX_KEPT_BYTES, Workspace, intermediates, num_bytes

_MAX_CACHED_CHOICES = 1024


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel ready to launch: its spec, how the schedule was chosen, its artifact and its entry."""

    spec: KernelSpec
    match: Match | None
    artifact: Artifact
    entry: Callable[..., None]

    @property
    def report(self) -> dict:
        """Registers, spills and shared memory as ptxas reported them, and the declared roles."""
        from .resources import estimate

        roles = estimate(self.spec.problem, self.spec.schedule).roles
        return {
            "kernel": self.spec.problem.kernel,
            "schedule": str(self.spec.schedule),
            "chosen": str(self.match) if self.match else "given by the caller",
            **self.artifact.report,
            "roles": {r.name: {"warps": r.warps, "registers": r.registers} for r in roles},
        }


class CompiledOp:
    """The operator for one `OpConfig`: takes CUDA tensors, launches on torch's current stream, never synchronises.

    After the first call it may be captured into a CUDA graph.  Allocates with torch's allocator what the caller does
    not give: o, the final state, and the intermediates, of which small ones are kept (`workspace.take_kept`).
    """

    def __init__(
        self,
        config: OpConfig,
        chunk_size: int,
        kernels: dict[str, CompiledKernel],
        options: tuple[plan.Option, ...] = (),
        variants: dict[Schedule, CompiledKernel] | None = None,
        models: SplitModels | None = None,
        load_split: Callable[[str, Schedule | None], CompiledKernel] | None = None,
    ):
        """kernels: one per name.  options, variants: what `plan` may choose from for `fused_forward` instead.

        models: what `split_plan` decides by; without them `choose` splits nothing.  load_split: a kernel of
        `SPLIT_KERNELS` by name and schedule, None for the one that the database or the template prefers.
        """
        self.config = config
        self.chunk_size = chunk_size
        self.kernels = kernels
        self.options = options
        self.variants = {kernels["fused_forward"].spec.schedule: kernels["fused_forward"], **(variants or {})}
        self._chosen: dict[tuple, Callable[..., None]] = {}
        self._models = models
        self._load_split = load_split
        self._split_kernels: dict[tuple[str, Schedule | None], CompiledKernel] = {}
        self._splits: dict[tuple, SplitForward] = {}
        self._kkt_inverse = kernels["kkt_inverse"].entry
        self._problem = kernels["fused_forward"].spec.problem
        self._state_dtype = launch.torch_dtype(config.state_dtype)
        found = kernels.get("input_activation")
        self._activation = found and ActivationKernel(found.spec.problem, found.entry)
        self._prepared: dict[tuple, PreparedCall] = {}
        self._absent: dict[torch.device, torch.Tensor] = {}

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
        cu_host: tuple[int, ...] | None = None,
        state_rows: torch.Tensor | None = None,
        final_state_out: torch.Tensor | None = None,
        checkpoints: Checkpoints | None = None,
        workspace: Workspace | None = None,
        forward: Callable[..., None] | None = None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the kernels on tokens laid end to end; the arguments are not checked (`chunk_gated_delta_rule` does).

        q, k ``[T, H, K]``, v ``[T, HV, V]`` in the config's dtype; g, beta ``[T, HV]`` fp32; bounds ``[N + 1]`` int32,
        cumulative lengths on the device; initial_state in the config's layout and state_dtype.  All contiguous.
        cu_host: the same lengths on the host, which decide between several tuned schedules of `fused_forward`; or
        forward: what `choose` or `split` answered for them.
        state_rows: ``[N]`` int32; initial_state is a pool then, and final states go back to it.
        activation: what is done to q, k, g and beta first; g and beta are in the dtypes of the config then.
        out, final_state_out, checkpoints: where results are written.  workspace: where intermediates are.
        Returns (o ``[T, HV, V]``, final state or None).
        """
        device = q.device
        modes = None if activation is None else Modes.of(activation, g.dtype, beta.dtype)
        if forward is None:
            forward = self.choose(cu_host, device)
        return self.prepare(q.shape[0], bounds.shape[0] - 1, device, forward, modes)(
            q, k, v, g, beta, bounds, scale, initial_state, output_final_state, out, state_rows, final_state_out,
            checkpoints, workspace, activation,
        )  # fmt: skip

    def prepare(
        self,
        num_tokens: int,
        num_sequences: int,
        device: torch.device,
        forward: Callable[..., None],
        modes: Modes | None = None,
    ) -> PreparedCall:
        """What calls of this size share.  forward: what `choose` or `split` answered.  modes: of the activation.

        Kept per content, but not what is made while a CUDA graph is captured.
        """
        key = num_tokens, num_sequences, device, forward, modes
        found = self._prepared.get(key)
        if found is None:
            scratch = forward.scratch if isinstance(forward, SplitForward) else ()
            layout = scratch + intermediates(self._problem, num_tokens, num_sequences)
            gates = (torch.float32, torch.float32)
            if modes is not None:
                layout += self._activation.outputs(modes, num_tokens)
                gates = tuple(map(launch.torch_dtype, (self.config.gate_dtype, self.config.beta_dtype)))
            found = PreparedCall(
                kkt_inverse=self._kkt_inverse,
                forward=forward,
                activation=self._activation,
                modes=modes,
                arguments=PerThread(lambda: Arguments(self._problem, gates, num_tokens, layout, device)),
                device=device,
                layout=layout,
                num_scratch=len(scratch),
                is_small=num_bytes(layout) <= MAX_KEPT_BYTES,
                chunk_size=self.chunk_size,
                default_scale=self.config.head_dim_k**-0.5,
                state_shape=launch.state_shape(self._problem, num_sequences),
                absent=self._absent_state(device),
                state_rows=device_indices.ramp(num_sequences, device),
            )
            if device_indices.is_capturing(device):
                return found
            if len(self._prepared) >= _MAX_CACHED_CHOICES:
                self._prepared.clear()
            self._prepared[key] = found
        return found

    def report(self) -> list[dict]:
        """One entry per kernel: schedule, why it was chosen, registers per role, spills, shared memory."""
        others = [k for k in self.kernels.values() if k.spec.problem.kernel != "fused_forward"]
        return [kernel.report for kernel in (*others, *self.variants.values(), *self._split_kernels.values())]

    def explain(
        self,
        lengths: Sequence[int],
        window: str | float = EXACT,
        window_share: float | None = None,
        sm_count: int | None = None,
    ) -> str:
        """The plan for sequences of ``lengths`` tokens as text: what is chosen and why, times predicted, alternatives.

        window: as of the operator.  window_share: of the value heads, those whose gates are known to decay, if anything
        is.  sm_count: of another card than torch's current one.
        """
        if self._models is None:
            return "whole sequences: the caller gave the schedules, or they have chunks that no split knows"
        return explained(self._models, lengths, window, window_share, sm_count)

    def choose(
        self,
        cu_host: tuple[int, ...] | None,
        device: torch.device,
        may_split: bool = False,
        window: str | float = EXACT,
        window_share: float | None = None,
    ) -> Callable[..., None]:
        """What to launch for these lengths: an entry of `fused_forward`, or what is predicted to take less: a split, or
        the forward of a split on whole sequences, long ones first.

        window, window_share: as of the operator.  The choice is kept per content.  While a CUDA graph is captured
        nothing is split that was not chosen before.
        """
        may_split = may_split and self._models is not None and self._models.can_split
        if cu_host is None or (len(self.variants) == 1 and not may_split):
            return self.kernels["fused_forward"].entry
        key = cu_host, device, may_split and (window, window_share)
        found = self._chosen.get(key)
        if found is None:
            if may_split and device_indices.is_capturing(device):
                return self.choose(cu_host, device)
            lengths = [end - start for start, end in zip(cu_host, cu_host[1:])]
            sm_count = torch.cuda.get_device_properties(device).multi_processor_count
            if may_split:
                found = self._planned(cu_host, lengths, device, sm_count, window, window_share)
            if found is None:
                fallback = self.kernels["fused_forward"].spec.schedule
                schedule = plan.choose(self._problem, self.options, lengths, sm_count, fallback)
                found = self.variants[schedule].entry
            if len(self._chosen) >= _MAX_CACHED_CHOICES:
                self._chosen.clear()
            self._chosen[key] = found
        return found

    def _planned(
        self, cu_host, lengths, device, sm_count: int, window: str | float, window_share: float | None
    ) -> Callable[..., None] | None:
        """What the plan chooses; None where that is `fused_forward` by a schedule without a prediction."""
        planned = plan_split(self._models, lengths, sm_count, window, window_share)
        if planned.chosen.is_ordered:
            return self.ordered(cu_host, device, planned.schedules["segment_forward"])
        if planned.segment_chunks is None:
            variant = self.variants.get(planned.schedules["fused_forward"])
            is_predicted = planned.predicted_us["fused_forward"] is not None
            return variant.entry if variant is not None and is_predicted else None
        schedules = {name: planned.schedules[name] for name in SPLIT_KERNELS}
        return self.split(cu_host, planned.segment_chunks, device, window, schedules)

    def ordered(self, cu_host: tuple[int, ...], device: torch.device, schedule: Schedule | None = None) -> SplitForward:
        """``forward`` for whole sequences that starts the long ones first, as `fused_forward` does not.

        schedule: of `segment_forward`; None for what the database or the template prefers.  Errors as of `split`.
        """
        return self._cut(cu_host, None, device, EXACT, (("segment_forward", schedule),))

    def split(
        self,
        cu_host: tuple[int, ...],
        segment_chunks: int | None,
        device: torch.device,
        window: str | float = EXACT,
        schedules: Mapping[str, Schedule] | None = None,
    ) -> SplitForward | None:
        """``forward`` for sequences cut into segments of at most ``segment_chunks`` chunks; None where that cuts none.

        window: "exact", or the factor in (0, 1) by which what is dropped may still count in a segment's start state.
        schedules: of `SPLIT_KERNELS`, by name; those that the database or the templates prefer if None.  Kept per
        content.  Raises UnsupportedError where no kernel can split, KernelMissingError in strict mode.
        """
        chosen = tuple((name, schedules and schedules[name]) for name in SPLIT_KERNELS)
        found = self._cut(cu_host, segment_chunks, device, window, chosen)
        return found if found.segments.is_cut else None

    def _cut(self, cu_host, segment_chunks, device, window, chosen: tuple[tuple[str, Schedule | None], ...]):
        """The `SplitForward` of some kernels by name and schedule; kept per content."""
        key = cu_host, segment_chunks, device, window, chosen
        if key not in self._splits:
            if device_indices.is_capturing(device):
                raise InputError(
                    "a CUDA graph capture must not be under way when a batch is cut for the first time, but one is; "
                    "call once with these lengths before the capture."
                )
            kernels = {name: self.load_split(name, schedule) for name, schedule in chosen}
            lengths = [end - start for start, end in zip(cu_host, cu_host[1:])]
            segments = cut_batch(kernels["segment_forward"].spec.problem, lengths, segment_chunks)
            if len(self._splits) >= _MAX_CACHED_CHOICES:
                self._splits.clear()
            entries = {name: kernel.entry for name, kernel in kernels.items()}
            self._splits[key] = SplitForward(entries, segments, self.config.num_value_heads, window, device)
        return self._splits[key]

    def load_split(self, name: str, schedule: Schedule | None = None) -> CompiledKernel:
        """A kernel of `SPLIT_KERNELS`, built or loaded at its first use; errors as of `split`."""
        found = self._split_kernels.get((name, schedule))
        if found is None:
            if self._load_split is None:
                raise UnsupportedError(
                    f"`chunk_size == 64` must hold to split sequences, but got {self.chunk_size}; run them whole."
                )
            found = self._split_kernels[name, schedule] = self._load_split(name, schedule)
        return found

    def _absent_state(self, device: torch.device) -> torch.Tensor:
        """`PreparedCall.absent`."""
        if device not in self._absent:
            self._absent[device] = torch.empty(
                launch.state_shape(self._problem, 1), dtype=self._state_dtype, device=device
            )
        return self._absent[device]


def explained(
    models: SplitModels, lengths: Sequence[int], window: str | float, window_share: float | None, sm_count: int | None
) -> str:
    """The plan of a forward or a backward as text; arguments as of `CompiledOp.explain`."""
    if sm_count is None:
        sm_count = torch.cuda.get_device_properties("cuda").multi_processor_count
    return describe(plan_split(models, lengths, sm_count, window, window_share))


@dataclass(frozen=True)
class Selection:
    """What a config runs: one (spec, match) per kernel, and what `plan` may choose from for `fused_forward`.

    models: what `split_plan` chooses by, None where it has no choice.
    """

    chunk_size: int
    kernels: dict[str, tuple[KernelSpec, Match | None]]
    options: tuple[plan.Option, ...]
    models: SplitModels | None = None

    @property
    def variants(self) -> list[KernelSpec]:
        """Other schedules of `fused_forward` that a call's lengths may choose."""
        main = self.kernels["fused_forward"][0]
        return [KernelSpec(main.problem, o.schedule) for o in self.options if o.schedule != main.schedule]

    @property
    def specs(self) -> list[KernelSpec]:
        """Every kernel that a call with this config can launch."""
        return [*(spec for spec, _ in self.kernels.values()), *self.variants, *self.split_specs]

    @property
    def split_specs(self) -> list[KernelSpec]:
        """Kernels of a split that the plan of a call may choose."""
        if self.models is None or not self.models.can_split:
            return []
        models = self.models
        return [KernelSpec(models.problems[name], o.schedule) for name in SPLIT_KERNELS for o in models.options[name]]


def select_kernels(
    config: OpConfig, db: Database | None = None, schedules: dict[str, Schedule] | None = None
) -> Selection:
    """Choose the kernels of ``config``; builds nothing.  Arguments and errors as in `compile`."""
    db = open_db() if db is None else db
    chunk_size = _chunk_size(config, db)
    kernels, options = {}, ()
    for name in config.kernels:
        problem = config.problem(name, chunk_size)
        if schedules and name in schedules:
            kernels[name] = KernelSpec(problem, schedules[name]), None
            continue
        match = db.lookup(problem)
        kernels[name] = KernelSpec(problem, match.schedule), match
        if name == "fused_forward":
            options = plan.options(problem, db.siblings(match), db.fits(problem))
    models = SplitModels.of(config, db) if not schedules and chunk_size == DEFAULT_CHUNK_SIZE else None
    return Selection(chunk_size, kernels, options, models)


def compile(
    config: OpConfig,
    db: Database | None = None,
    store: ArtifactStore | None = None,
    schedules: dict[str, Schedule] | None = None,
    strict: bool | None = None,
) -> CompiledOp:
    """Choose, build or load the kernels of ``config``.

    db: where tuned rows come from (the user's over the shipped ones by default).  store: where artifacts live.
    schedules: override the choice per kernel name.  strict: raise KernelMissingError instead of building (default
    $QLA_STRICT).  Raises UnsupportedError, InfeasibleError, CompilerMissingError, BuildError.
    """
    db = open_db() if db is None else db
    chosen = select_kernels(config, db, schedules)
    load = Loader(ArtifactStore() if store is None else store, env.strict() if strict is None else strict)
    kernels = {name: load(spec, match) for name, (spec, match) in chosen.kernels.items()}
    match = chosen.kernels["fused_forward"][1]
    variants = {spec.schedule: load(spec, match) for spec in chosen.variants}
    if chosen.chunk_size != DEFAULT_CHUNK_SIZE:
        return CompiledOp(config, chosen.chunk_size, kernels, chosen.options, variants)

    def load_split(name: str, schedule: Schedule | None) -> CompiledKernel:
        problem = config.problem(name)
        given = schedule or (schedules or {}).get(name)
        looked_up = None if given else db.lookup(problem)
        return load(KernelSpec(problem, given or looked_up.schedule), looked_up)

    operator = CompiledOp(config, chosen.chunk_size, kernels, chosen.options, variants, chosen.models, load_split)
    for spec in chosen.split_specs:
        operator.load_split(spec.problem.kernel, spec.schedule)
    return operator


@dataclass(frozen=True)
class Loader:
    """Kernels from the store, built if missing unless ``strict``."""

    store: ArtifactStore
    strict: bool

    def __call__(self, spec: KernelSpec, match: Match | None) -> CompiledKernel:
        artifact = self.store.get(spec, build.flags(spec)) if self.strict else build.ensure(spec, self.store)
        if artifact is None:
            raise KernelMissingError(
                f"in strict mode every kernel must be in {self.store.root}, but {spec} with {spec.schedule} is not; "
                "build it ahead with qla_jit.compile(config) where nvcc is installed."
            )
        return CompiledKernel(spec, match, artifact, runtime.load(artifact))


def _chunk_size(config: OpConfig, db: Database) -> int:
    """The chunk size whose tuned kernels are fastest in sum; the largest supported one where nothing is tuned."""
    totals = {}
    for chunk_size in reversed(CHUNK_SIZES):
        try:
            matches = [db.lookup(config.problem(name, chunk_size)) for name in FORWARD_KERNELS]
        except UnsupportedError:
            continue
        rows = [m.row for m in matches]
        totals[chunk_size] = sum(r.median_us for r in rows) if all(rows) else float("inf")
    if not totals:
        return CHUNK_SIZES[-1]  # lookup there raises the reason
    return min(totals, key=totals.get)
