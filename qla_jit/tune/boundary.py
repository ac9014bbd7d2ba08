"""Where splitting pays, per operator, in the plane of sequences × value heads and their length: by the cost models, as
measured where the database has both ways, and by the fixed rules of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..config import FORWARD_KERNELS, SPLIT_KERNELS, OpConfig, Problem
from ..db.lookup import Match, choose, family
from ..db.records import BestRow, CostModel, Environment
from ..model.features import MEASURED_TOLERANCE
from ..model.observation import Observation
from ..model.split_rows import problem_as
from ..planned import SplitPlan
from ..registry import candidates
from ..split_models import SplitModels
from ..split_plan import plan_split
from ..workload import DECAYING_PERCENT, parse

#: Lengths of the plane in tokens, half an octave apart, and its most sequences × heads.
LENGTHS = tuple(round(512 * 2 ** (i / 2)) for i in range(19))
MOST_PAIRS = 160
MOST_COLUMNS = 20


@dataclass(frozen=True)
class Rule:
    """A fixed rule of another library: whether it splits, by sequences × heads and chunks of 64 tokens.

    corners: its boundary as (sequences × heads, tokens), from short to long sequences.
    """

    name: str
    splits: Callable[[int, int], bool]
    corners: tuple[tuple[float, float], ...]


_SHORTEST, _LONGEST = float(LENGTHS[0]), float(LENGTHS[-1])
FLASHINFER = Rule("FlashInfer", lambda pairs, chunks: pairs < 66, ((66, _SHORTEST), (66, _LONGEST)))
#: FlashQLA 0.1.3 has a model of its own for sm90 and sm100; these are the rules that it falls back to without one.
FLASHQLA = Rule(
    "FlashQLA, fixed rule",
    lambda pairs, chunks: pairs <= 40 or (pairs <= 56 and chunks >= 128),
    ((40, _SHORTEST), (40, 128 * 64.0), (56, 128 * 64.0), (56, _LONGEST)),
)
FLASHQLA_SM100 = Rule(
    "FlashQLA, fixed rule",
    lambda pairs, chunks: (pairs <= 56 and chunks >= 256) or (pairs <= 32 and chunks >= 192),
    ((0, 192 * 64.0), (32, 192 * 64.0), (32, 256 * 64.0), (56, 256 * 64.0), (56, _LONGEST)),
)


def rules(arch: str) -> tuple[Rule, ...]:
    """The rules of an architecture, as read in the libraries' sources; of FlashInfer there is one for sm90 alone."""
    if arch in ("sm100", "sm103"):
        return (FLASHQLA_SM100,)
    return (FLASHINFER, FLASHQLA) if arch == "sm90" else (FLASHQLA,)


@dataclass(frozen=True)
class Column:
    """One number of equal sequences: how the plan runs each of `LENGTHS`."""

    sequences: int
    pairs: int
    plans: tuple[SplitPlan, ...]

    @property
    def split_lengths(self) -> list[int]:
        """Of `LENGTHS`, those that are split."""
        return [length for length, plan in zip(LENGTHS, self.plans) if plan.segment_chunks is not None]


@dataclass(frozen=True)
class Measured:
    """Equal sequences that were measured whole and split: µs without `kkt_inverse`, of the best schedules and cut."""

    pairs: int
    tokens: int
    sequences: int
    whole_us: float
    split_us: float
    segment_chunks: int
    plan: SplitPlan

    @property
    def pays(self) -> bool:
        return self.split_us < self.whole_us


@dataclass(frozen=True)
class Boundary:
    """The plane of one operator on one card.  forward: its `segment_forward`, which names it."""

    forward: Problem
    environment: Environment
    columns: tuple[Column, ...]
    measured: tuple[Measured, ...]


class _Rows:
    """Lookups over rows at hand, as `db.Database` answers them."""

    def __init__(self, best: Sequence[tuple[str, BestRow]], fits: Sequence[CostModel]):
        self._best, self._fits = best, fits

    def lookup(self, problem: Problem) -> Match:
        return choose(problem, self._best)

    def siblings(self, match: Match) -> list[BestRow]:
        row = match.row
        if row is None:
            return []
        same = match.layer, row.problem, row.template_digest
        return [other for layer, other in self._best if (layer, other.problem, other.template_digest) == same]

    def fits(self, problem: Problem) -> list[CostModel]:
        return [fit for fit in self._fits if fit.problem in (problem, family(problem))]


def boundaries(
    best: Sequence[tuple[str, BestRow]], fits: Iterable[CostModel], found: Sequence[Observation]
) -> list[Boundary]:
    """The planes of all operators that have rows and cost models of every kernel of a split, in the order of ``best``.

    best: (layer, row).  found: times of the same database.
    """
    fits = list(fits)
    rows, planes = _Rows(best, fits), []
    for forward in dict.fromkeys(row.problem for _, row in best if row.problem.kernel == "segment_forward"):
        config = OpConfig(
            forward.num_heads, forward.num_value_heads, forward.head_dim_k, forward.head_dim_v, forward.dtype,
            forward.state_dtype, bool(forward.state_v_first), forward.arch,
        )  # fmt: skip
        if not all(candidates(config.problem(kernel, forward.chunk_size)) for kernel in FORWARD_KERNELS):
            continue  # rows of a version with other templates
        models = SplitModels.of(config, rows, forward.chunk_size)
        if models.can_split:
            fit = next(f for f in rows.fits(forward) if f.form == "work")
            planes.append(_plane(forward, fit.environment, models, found))
    return planes


def _plane(forward: Problem, environment: Environment, models: SplitModels, found: Sequence[Observation]) -> Boundary:
    heads, columns = forward.num_value_heads, []

    def plan(lengths: Sequence[int]) -> SplitPlan:
        return plan_split(models, lengths, environment.sm_count, MEASURED_TOLERANCE)

    most = max(1, MOST_PAIRS // heads)
    for sequences in range(1, most + 1, -(-most // MOST_COLUMNS)):
        plans = tuple(plan([length] * sequences) for length in LENGTHS)
        columns.append(Column(sequences, sequences * heads, plans))
    measured = []
    for lengths, (whole_us, cuts) in sorted(_both_ways(forward, environment, found).items()):
        split_us, segment_chunks = min(cuts)
        pairs = len(lengths) * heads
        measured.append(Measured(pairs, lengths[0], len(lengths), whole_us, split_us, segment_chunks, plan(lengths)))
    return Boundary(forward, environment, tuple(columns), tuple(measured))


def _both_ways(
    forward: Problem, environment: Environment, found: Sequence[Observation]
) -> dict[tuple[int, ...], tuple[float, list[tuple[float, int]]]]:
    """By the lengths of equal sequences: the best whole time, and of every cut the sum of its kernels' best times."""
    wanted = {problem_as(forward, kernel): kernel for kernel in ("fused_forward", *SPLIT_KERNELS)}
    times: dict[tuple, float] = {}
    for o in found:
        asked = parse(o.workload)
        one_length, usual = len(set(asked.lengths)) == 1, asked.decaying_percent == DECAYING_PERCENT
        if o.problem in wanted and o.environment == environment and one_length and usual:
            key = asked.lengths, asked.segment_chunks, wanted[o.problem]
            times[key] = min(o.time_us, times.get(key, o.time_us))
    both: dict[tuple[int, ...], tuple[float, list[tuple[float, int]]]] = {}
    for lengths, segment_chunks, kernel in times:
        parts = [times.get((lengths, segment_chunks, name)) for name in SPLIT_KERNELS]
        whole_us = times.get((lengths, None, "fused_forward"))
        if kernel == SPLIT_KERNELS[0] and None not in (*parts, whole_us):
            both.setdefault(lengths, (whole_us, []))[1].append((sum(parts), segment_chunks))
    return both
