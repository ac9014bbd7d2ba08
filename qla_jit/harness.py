"""One kernel alone: seeded data on the device, a launch, and its error against float64.  Used by the tuner and tests.

Inputs of a kernel that are another kernel's outputs come from the float64 reference, rounded once, so an error found
here is the kernel's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import backward_harness, launch, segment_harness
from .config import SPLIT_KERNELS, Problem
from .errors import ConfigError
from .numerics import GPU_TOLERANCE, make_inputs, relative_errors
from .ragged import chunk_slots
from .reference import (
    fused_forward_reference,
    gate_scan_reference,
    input_activation_reference,
    kkt_inverse_reference,
)

#: Of outputs in fp32, whatever the dtype of the others: sums of 64 numbers, and a few functions of one number.
FP32_TOLERANCE = {"log_gates": 1e-5, "g_out": 2e-6, "beta_out": 2e-6, "starts": 1e-12, "decays": 1e-5}
#: Of the cases of a split: what the window may drop, far below the tolerance of what is compared.
WINDOW = 1e-5


#: The argument whose rows have a CTA, where that may be none.
CTAS_OF_ROWS = {"segment_state": "turns", "segment_correct": "cut_sequences"}
#: Outputs per slot; a slot that no chunk owns holds anything.
OF_SLOTS = ("a", "log_gates", "states", "dstates")


@dataclass
class Case:
    """A kernel's arguments by name and what its outputs should be.

    tensors: every argument, outputs included.  wanted: float64 reference per output, made at first need.
    owned: slots that a chunk owns; the others hold unspecified data.
    prepare: writes inputs that lie in an output's memory.  read: outputs in the form of ``wanted``, where they are
    packed.  Both are given the tensors.
    """

    problem: Problem
    tensors: dict[str, object]
    reference: Callable[[], dict[str, torch.Tensor]]
    owned: torch.Tensor
    tolerance: float
    prepare: Callable[[dict], None] = lambda tensors: None
    read: Callable[[dict], dict[str, torch.Tensor]] = lambda tensors: tensors
    _wanted: dict[str, torch.Tensor] | None = field(default=None, repr=False)

    @property
    def arguments(self) -> list:
        """In the kernel's order."""
        return [self.tensors[name] for name in launch.ARGUMENTS[self.problem.kernel]]

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """Float64 reference of every output."""
        if self._wanted is None:
            self._wanted = self.reference()
        return self._wanted

    def launch(self, kernel: Callable[..., None]) -> None:
        """Run the kernel once on torch's current stream; nothing where it has no CTA, as where no sequence is cut."""
        rows = CTAS_OF_ROWS.get(self.problem.kernel)
        if rows is None or len(self.tensors[rows]):
            kernel(*self.arguments)

    def poison(self) -> None:
        """Fill every output with NaN, so that what a kernel does not write is seen."""
        for name in launch.OUTPUTS[self.problem.kernel]:
            x = self.tensors[name]
            x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min)
        self.prepare(self.tensors)

    def copy(self) -> Case:
        """The same case in memory of its own, which `refill` can give other data."""
        own = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in self.tensors.items()}
        return replace(self, tensors=own)

    def refill(self, other: Case) -> None:
        """Take the data and the reference of another case of equal shapes, keeping this case's addresses."""
        for name, value in other.tensors.items():
            if isinstance(value, torch.Tensor):
                self.tensors[name].copy_(value)
        self.reference, self._wanted = (lambda: other.wanted), None
        self.prepare, self.read = other.prepare, other.read

    def written(self) -> dict[str, torch.Tensor]:
        """Copies of the outputs in the form of ``wanted``, without what may hold anything: equal from run to run."""
        found = self.read(self.tensors)
        return {name: self._specified(name, found[name]).clone() for name in self.wanted}

    def error(self) -> float:
        """Largest relative error over the outputs, that of fp32 outputs in units in which their bound is `tolerance`;
        inf if any is not finite."""
        found = self.read(self.tensors)
        pairs = ([self._specified(name, x) for x in (found[name], want)] for name, want in self.wanted.items())
        errors = zip(self.wanted, relative_errors(pairs))
        return max((e * self.tolerance / FP32_TOLERANCE.get(name, self.tolerance) for name, e in errors), default=0.0)

    def _specified(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The part of an output that a kernel has to write."""
        if name in OF_SLOTS:
            x = x[self.owned]
        return launch.without_upper_quarter(x) if name == "a" else x


def make_case(
    problem: Problem,
    lengths: Sequence[int],
    seed: int,
    device: str | torch.device = "cuda",
    gates: str = "bench",
    key_correlation: float = 0.0,
    chunks_per_checkpoint: int = 0,
    segment_chunks: int | None = None,
    window: str | float = WINDOW,
) -> Case:
    """A case of one kernel on sequences of ``lengths`` tokens; see `numerics.make_inputs` for the data.

    The state of sequence n is in row N - 1 - n of a pool; a forward writes checkpoints if told to.  segment_chunks,
    window: how the kernels of a split cut the batch, None for as finely as can be, and what windows may drop.
    """
    try:
        make = _MAKERS[problem.kernel]
    except KeyError:
        raise ConfigError(f"`kernel in {KERNELS}` must hold, but got {problem.kernel!r}.") from None
    inputs = make_inputs(
        lengths,
        problem.num_heads or problem.num_value_heads,
        problem.num_value_heads,
        problem.head_dim_k or 64,
        problem.head_dim_v or 64,
        dtype=launch.torch_dtype(problem.dtype or "bfloat16"),
        device=device,
        seed=seed,
        gates=gates,
        key_correlation=key_correlation,
        draw_on=device,
    )
    slots = [slot for slot, _, _ in chunk_slots(inputs.cu_host, problem.chunk_size)]
    owned = torch.tensor(slots, dtype=torch.int64, device=device)
    more = {}
    if problem.kernel in ("fused_forward", *SPLIT_KERNELS):
        more = {"chunks_per_checkpoint": chunks_per_checkpoint}
    if problem.kernel in SPLIT_KERNELS:
        more |= {"segment_chunks": segment_chunks, "window": window}
    return make(problem, inputs, owned, **more)


def _input_activation_case(problem: Problem, inputs, owned: torch.Tensor) -> Case:
    """Everything at once: keys of very different lengths, logits on both sides of where softplus becomes linear."""
    tokens, heads = inputs.g.shape[1:]
    device = inputs.g.device
    lengths = torch.logspace(-3, 2, tokens, device=device)[:, None, None]
    q, k = ((x[0] * lengths).to(x.dtype) for x in (inputs.q, inputs.k))
    g = inputs.g[0].to(launch.torch_dtype(problem.gate_dtype))
    beta = torch.logit(inputs.beta[0]).to(launch.torch_dtype(problem.beta_dtype))
    a_log, dt_bias = torch.linspace(-4, 3, heads, device=device), torch.linspace(-8, 24, heads, device=device)

    def reference():
        wanted = input_activation_reference(q, k, g, beta, True, a_log, dt_bias, 2.0)
        return dict(zip(launch.OUTPUTS["input_activation"], wanted))

    tensors = {
        "q": q, "k": k, "g": g, "beta": beta, "a_log": a_log, "dt_bias": dt_bias,
        "a_log_half": a_log.to(q.dtype), "dt_bias_half": dt_bias.to(q.dtype),
        "q_out": torch.empty_like(q), "k_out": torch.empty_like(k),
        "g_out": torch.empty_like(inputs.g[0]), "beta_out": torch.empty_like(inputs.beta[0]),
        "qk_mode": 1, "g_mode": 2, "beta_mode": 3, "a_log_mode": 1, "dt_bias_mode": 1,
    }  # fmt: skip
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[k.dtype])


def _kkt_inverse_case(problem: Problem, inputs, owned: torch.Tensor) -> Case:
    k, beta, g, bounds = inputs.k[0], inputs.beta[0], inputs.g[0], inputs.cu_seqlens
    shape = launch.inverse_shape(problem, k.shape[0], len(inputs.cu_host) - 1)
    a = torch.empty(shape, dtype=k.dtype, device=k.device)
    log_gates = torch.empty(shape[:3], dtype=torch.float32, device=k.device)

    def reference():
        return {
            "a": kkt_inverse_reference(inputs.k, inputs.beta, inputs.cu_host, problem.chunk_size),
            "log_gates": gate_scan_reference(inputs.g, inputs.cu_host, problem.chunk_size),
        }

    tensors = {"k": k, "beta": beta, "g": g, "bounds": bounds, "a": a, "log_gates": log_gates}
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[k.dtype])


def _fused_forward_case(problem: Problem, inputs, owned: torch.Tensor, chunks_per_checkpoint: int) -> Case:
    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    state_dtype = launch.torch_dtype(problem.state_dtype or "float32")
    initial = inputs.initial_state.mT if problem.state_v_first else inputs.initial_state
    initial = initial.to(state_dtype).contiguous()
    nan = float("nan")
    shape = launch.inverse_shape(problem, k.shape[0], len(inputs.cu_host) - 1)
    a = torch.full(shape, nan, dtype=k.dtype, device=k.device)
    a[owned] = kkt_inverse_reference(inputs.k, inputs.beta, inputs.cu_host, problem.chunk_size)[owned].to(a.dtype)
    a[..., : problem.chunk_size // 2, problem.chunk_size // 2 :] = nan
    log_gates = torch.full(a.shape[:3], nan, dtype=torch.float32, device=k.device)
    log_gates[owned] = gate_scan_reference(inputs.g, inputs.cu_host, problem.chunk_size)[owned].float()

    every = chunks_per_checkpoint * problem.chunk_size
    counts = [(b - a) // every if every else 0 for a, b in zip(inputs.cu_host, inputs.cu_host[1:])]

    def reference():
        def run(cu, pieces=(slice(None),)):
            tokens = [torch.cat([x[:, piece] for piece in pieces], dim=1) for x in inputs.tokens]
            return fused_forward_reference(
                *tokens, inputs.scale, initial, cu, bool(problem.state_v_first), problem.chunk_size
            )

        o, final = run(inputs.cu_host)
        wanted = {"o": o[0], "final": final.flip(0)}
        if sum(counts):
            wanted["checkpoints"] = torch.cat([_state_after(run, inputs, n, i * every) for n, i in _intervals(counts)])
        return wanted

    rows = torch.arange(len(counts), dtype=torch.int32, device=k.device)
    tensors = {
        "q": q, "k": k, "v": v, "a": a, "log_gates": log_gates, "bounds": inputs.cu_seqlens,
        "state_rows": rows.flip(0).contiguous(),
        "checkpoint_rows": torch.tensor([0, *itertools.accumulate(counts)][:-1], dtype=torch.int32, device=k.device),
        "initial": initial.flip(0).contiguous(), "final": torch.empty_like(initial),
        "checkpoints": initial.new_full((max(1, sum(counts)), *initial.shape[1:]), nan), "o": torch.empty_like(v),
        "scale": inputs.scale, "has_initial": 1, "has_final": 1, "chunks_per_checkpoint": chunks_per_checkpoint,
    }  # fmt: skip
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[k.dtype])


def _split_case(
    problem: Problem, inputs, owned: torch.Tensor, chunks_per_checkpoint: int, segment_chunks, window
) -> Case:
    """Of any kernel of a split, on the tensors of `fused_forward` and those of the cut."""
    whole = _fused_forward_case(problem, inputs, owned, chunks_per_checkpoint)
    # The references take states as [K, V], and in the order of the sequences.
    initial = whole.tensors["initial"].flip(0)
    cut = segment_harness.SplitCase(
        problem, inputs, initial.mT if problem.state_v_first else initial, segment_chunks, window
    )
    whole.tensors |= cut.tensors(inputs.g.device)
    if problem.kernel == "segment_forward":
        whole.prepare = lambda tensors: segment_harness.write_starts(cut, tensors)
    elif problem.kernel == "segment_state":
        whole.read = lambda tensors: segment_harness.state_outputs(cut, tensors)
        whole.reference = lambda: segment_harness.state_wanted(cut)
    else:
        whole.prepare = lambda tensors: segment_harness.write_uncorrected(cut, tensors)
        whole.read = lambda tensors: segment_harness.corrected(cut, tensors)
        whole.reference = lambda: segment_harness.corrected_wanted(cut)
    whole.prepare(whole.tensors)
    return whole


def _recompute_state_case(problem: Problem, inputs, owned: torch.Tensor) -> Case:
    tensors, reference = backward_harness.recompute_state_tensors(problem, inputs, owned)
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[inputs.k.dtype])


def _backward_state_case(problem: Problem, inputs, owned: torch.Tensor) -> Case:
    tensors, reference = backward_harness.backward_state_tensors(problem, inputs, owned)
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[inputs.k.dtype])


def _backward_grad_case(problem: Problem, inputs, owned: torch.Tensor) -> Case:
    tensors, reference = backward_harness.backward_grad_tensors(problem, inputs, owned)
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[inputs.k.dtype])


def _intervals(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(sequence, 1-based interval) of every checkpoint, in the order of their rows."""
    return [(n, i) for n, count in enumerate(counts) for i in range(1, count + 1)]


def _state_after(run: Callable, inputs, sequence: int, tokens: int) -> torch.Tensor:
    """[1, HV, ...] float64: the state of a sequence after its first ``tokens``, by running all sequences cut there."""
    pieces, cu = [], [0]
    for n, (start, _) in enumerate(zip(inputs.cu_host, inputs.cu_host[1:])):
        length = tokens if n == sequence else 0
        pieces.append(slice(start, start + length))
        cu.append(cu[-1] + length)
    return run(cu, pieces)[1][sequence : sequence + 1]


_MAKERS = {
    "input_activation": _input_activation_case,
    "kkt_inverse": _kkt_inverse_case,
    "fused_forward": _fused_forward_case,
    **dict.fromkeys(SPLIT_KERNELS, _split_case),
    "recompute_state": _recompute_state_case,
    "backward_state": _backward_state_case,
    "backward_grad": _backward_grad_case,
}
#: The kernels that have cases; those that only the backward of cut sequences has are checked as parts of it.
KERNELS = tuple(_MAKERS)
