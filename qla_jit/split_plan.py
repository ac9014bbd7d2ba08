"""Whether a batch is split, into segments of which length, and by which schedules: what the cost models say is fastest.

A plan is a function of host lengths, SM count and rows of the tuning database.  It compares the kernels of whole
sequences with those of a split (`config.Pass`, of a forward or of a backward) for a few segment lengths: those that
just fill the card, their halves and doubles, and then the neighbours of the best.  Nothing is split where a kernel of
the split has no cost model, where no sequence is long enough, or where whole sequences already keep all SMs busy.

Where the share of heads that forget is not known, a plan is made for the expected share and one for none at all, and
the one is taken that loses less where the other is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter, itemgetter

from .errors import InputError
from .model.features import (
    EXPECTED_WINDOW_SHARE,
    MEASURED_WARMUP_CHUNKS,
    WALK_SEGMENTS,
    WALK_SEQUENCES,
    Split,
    SplitItems,
    chains,
    chunk_counts,
    ctas_per_head,
    expected_warmup_chunks,
    launched,
    longest_segment,
    segments_of,
    separate_ctas,
    separate_steps,
    shared,
    shares,
    split_items,
    windowed_heads,
)
from .model.makespan import makespan
from .plan import Option
from .planned import Alternative, KernelTime, SplitPlan, name_of
from .segments import EXACT, least_segment_chunks
from .split_models import SplitModels

#: By how much a split must be predicted faster.  Cost models of the shipped database are off by 0.4 to 8.9 % on rows
#: that they have not seen (`loo_error`), 2.8 % in the median.
MARGIN = 0.05
#: What is tried next as factors of the fastest length so far, over and over while it gains, and then beside it.  Fewer
#: where more than `FEW` lengths differ, and fewer again of many sequences: there a try takes longer and matters less.
FACTORS = (0.5, 2.0, 2 / 3, 1.5)
NEIGHBOURS = (1.4, 1.2, 1.1, 1.05)
FEW = 4
FEW_SEQUENCES = 256
#: What the better of the first two lengths may take, of the whole sequences' time, for others to be tried among more.
HOPELESS = 1.1
#: Factors that are tried around a length that is near already.
STEPS = (2.0, 1.4, 1.2, 1.1)


#: {length: how many}; and an option with its least time in µs, its chains, how CTAs share them, its CTAs,
#: and the chunks of an SM if all had as many.
Chains = Mapping[int, int]
Bounded = tuple[float, Option, Chains, tuple[int, int], int, float]


def plan_split(
    models: SplitModels,
    lengths: Sequence[int],
    sm_count: int,
    window: str | float = EXACT,
    window_share: float | None = None,
) -> SplitPlan:
    """The plan for sequences of ``lengths`` tokens on ``sm_count`` SMs.

    window: "exact", or the tolerance of windows in (0, 1).  window_share: of the value heads, in [0, 1], those whose
    gates are known to decay so that windows hold; if None `EXPECTED_WINDOW_SHARE`, with caution where there are no more
    than `FEW_SEQUENCES`.  "exact" has no windows, whatever the gates.  Raises InputError for a share or a tolerance
    outside these.
    """
    share = EXPECTED_WINDOW_SHARE if window_share is None else window_share
    if not 0.0 <= share <= 1.0 or (window != EXACT and not 0.0 < window < 1.0):
        raise InputError(
            f'`0 <= window_share <= 1` and `window` "exact" or in (0, 1) must hold, but got window_share={share} and '
            f"window={window!r}; pass window_share=None where nothing is known about the gates."
        )
    if window == EXACT:
        return _Search(models, lengths, sm_count, 0.0, 0).plan()
    warmup = expected_warmup_chunks(window)
    search = _Search(models, lengths, sm_count, share, warmup)
    found = search.plan()
    if window_share is None and len(lengths) <= FEW_SEQUENCES and found.segment_chunks is not None:
        return search.with_caution(found)
    return found


class _Search:
    """One call of `plan_split`."""

    def __init__(self, models: SplitModels, lengths: Sequence[int], sm_count: int, share: float, warmup: int):
        problem = models.problems[models.kernels.whole[0]]
        self._kernels = models.kernels
        self._heaviest_first = models.kernels.split[::-1]  # what walks every segment is launched last
        self._models, self._sm_count, self._share, self._warmup = models, sm_count, share, warmup
        self._heads = problem.num_value_heads
        self._counts = chunk_counts(lengths, problem.chunk_size)
        self._chunks = sum([chunks * number for chunks, number in self._counts.items()])
        self._sequences = len(lengths)
        self._before = tuple(self._separate(kernel) for kernel in self._kernels.before)
        self._after = tuple(self._separate(kernel, is_first=False) for kernel in self._kernels.after)
        self._either_us = sum([found.predicted_us or 0.0 for found in (*self._before, *self._after)])
        self._seen: set[tuple[int, ...]] = set()
        self._shares: dict[str, list[tuple[Option, tuple[int, int]]]] = {}
        self._least_us = math.inf  # of the splits tried
        self._whole = self._whole_sequences()

    def plan(self, start: int | None = None) -> SplitPlan:
        whole = self._whole
        tried: dict[int, Alternative] = {}
        reason = self._reason_not_to_split(whole)
        if not reason:
            if start is None:
                self._try_segments(tried)
            else:
                self._try_near(start, tried)
            fastest = min(tried.values(), key=attrgetter("total_us"))
            if fastest.total_us < whole.total_us * (1 - MARGIN):
                others = (found for found in (whole, *tried.values()) if found is not fastest)
                return self._plan(fastest, others, "")
            reason = f"no split is predicted more than {MARGIN:.0%} faster"
        return self._plan(whole, tried.values(), reason)

    def with_caution(self, found: SplitPlan) -> SplitPlan:
        """``found``, this search's split, or the plan of a batch without windows, if that loses less at worst.

        A plan that would lose no more than `MARGIN` is only given up for whole sequences.
        """
        exact = copy(self)
        exact._share, exact._seen, exact._least_us = 0.0, set(), math.inf
        other = exact.plan(found.segment_chunks)
        if found.segment_chunks == other.segment_chunks:
            return found
        loses = exact._time_us(found.segment_chunks) / other.chosen.total_us - 1
        costs = self._time_us(other.segment_chunks) / found.chosen.total_us - 1
        if loses <= costs or (loses <= MARGIN and other.segment_chunks is not None):
            return found
        chosen = other.chosen if other.segment_chunks is None else self._alone(other.segment_chunks)
        others = [a for a in (found.chosen, *found.alternatives) if a.segment_chunks != chosen.segment_chunks]
        caution = (
            f"{name_of(found.chosen)} would take {max(costs, 0.0):.0%} less with windows on {self._share:.0%} of the "
            f"value heads, and {loses:.0%} more with none"
        )
        return replace(self._plan(chosen, others, other.reason), caution=caution)

    def _time_us(self, segment_chunks: int | None) -> float:
        return self._whole.total_us if segment_chunks is None else self._alone(segment_chunks).total_us

    def _alone(self, segment_chunks: int) -> Alternative:
        """A cut, whatever others take."""
        self._least_us = math.inf
        return self._split(segment_chunks)

    def _plan(self, chosen: Alternative, others: Iterable[Alternative], reason: str) -> SplitPlan:
        ordered = tuple(sorted(others, key=attrgetter("total_us")))
        return SplitPlan(chosen, ordered, reason, self._sm_count, self._share, self._warmup)

    def _separate(self, kernel: str, is_first: bool = True) -> KernelTime:
        """A kernel that does every chunk by itself, the same either way, by the schedule that was looked up."""
        schedule, time_us = self._models.schedules[kernel], None
        for option in self._models.options.get(kernel, ()):
            if option.schedule == schedule and self._chunks:
                problem = self._models.problems[kernel]
                ctas = separate_ctas(problem, schedule, self._chunks)
                depth = separate_steps(problem, schedule, ctas, self._sm_count)
                time_us = option.time_us(depth, ctas) if is_first else option.chained_us(depth, ctas)
        return KernelTime(kernel, schedule, time_us)

    def _alternative(self, segment_chunks: int | None, kernels: Sequence[KernelTime], time_us: float) -> Alternative:
        """Of the kernels between those that run either way, and their time."""
        return Alternative(segment_chunks, (*self._before, *kernels, *self._after), self._either_us + time_us)

    def _whole_sequences(self) -> Alternative:
        kernels = [self._whole_kernel(kernel) for kernel in self._kernels.whole]
        return self._alternative(None, kernels, sum([found.predicted_us or 0.0 for found in kernels]))

    def _whole_kernel(self, kernel: str) -> KernelTime:
        if not self._models.options[kernel] or not self._chunks:
            return KernelTime(kernel, self._models.schedules[kernel], None)
        if kernel == "fused_forward":
            return self._whole_forward()
        return self._fastest(kernel, self._bounded(kernel, self._heads_of_sequences()))

    def _heads_of_sequences(self) -> Chains:
        return {chunks: number * self._heads for chunks, number in self._counts.items()}

    def _whole_forward(self) -> KernelTime:
        """The faster of `fused_forward` and of `segment_forward` without a cut.

        `fused_forward` starts sequences in the order of the batch: where CTAs wait for others to end and lengths
        differ, a long one may start last.  `segment_forward` starts the long ones first, as makespans have it.
        """
        heads = self._heads_of_sequences()
        bounded = self._bounded("fused_forward", heads)
        found = {"fused_forward": bounded}
        if len(heads) > 1 and self._models.options.get("segment_forward"):
            ordered = self._bounded("segment_forward", heads)
            found["fused_forward"] = [option for option in bounded if option[4] <= self._sm_count]
            found["segment_forward"] = [option for option in ordered if option[4] > self._sm_count]
        times = [self._fastest(kernel, options) for kernel, options in found.items() if options]
        return min(times, key=attrgetter("predicted_us")) if times else self._fastest("fused_forward", bounded)

    def _bounded(self, kernel: str, found: Chains, items: SplitItems | None = None) -> list[Bounded]:
        """The options of a kernel with the least time that its work allows, the least first.  items: of a split."""
        longest = max(found, default=0)
        work = sum([length * number for length, number in found.items()]) / self._sm_count
        number = sum(found.values()) if items is None else launched(self._models.problems[kernel], items, found)
        bounded = []
        for option, by in self._options(kernel):
            times, among = by
            ctas, share = number * times // among, work * times / among
            least_us = option.chained_us(longest if longest > share else share, ctas, share)
            bounded.append((least_us, option, found, by, ctas, share))
        if len(bounded) > 1:
            bounded.sort(key=itemgetter(0))
        return bounded

    def _options(self, kernel: str) -> list[tuple[Option, tuple[int, int]]]:
        """The options of a kernel, each with how its CTAs share chains."""
        found = self._shares.get(kernel)
        if found is None:
            problem, options = self._models.problems[kernel], self._models.options[kernel]
            found = self._shares[kernel] = [(option, shares(problem, option.schedule)) for option in options]
        return found

    def _fastest(self, kernel: str, bounded: Sequence[Bounded]) -> KernelTime:
        best_us, best = math.inf, None
        for least_us, option, found, by, ctas, share in bounded:
            if least_us >= best_us:
                break
            time_us = option.chained_us(makespan(shared(found, by), self._sm_count), ctas, share)
            if time_us < best_us:
                best_us, best = time_us, option.schedule
        return KernelTime(kernel, best, best_us)

    def _reason_not_to_split(self, whole: Alternative) -> str:
        """What shows at once that no split pays, empty where that has to be tried."""
        if not self._models.can_split:
            return "the database has no cost models of all kernels of a split"
        self._least = least_segment_chunks(self._models.problems[self._kernels.split[-1]])
        longest, least = max(self._counts, default=0), self._least
        if longest < 2 * least:
            return f"no sequence has two segments of {least} chunks"
        self._weigh()
        if not self._may_be_one_wave and self._chain_us(0, 2) >= whole.total_us * (1 - MARGIN):
            return "whole sequences already keep the card as busy as a split could"
        return ""

    def _try_segments(self, tried: dict[int, Alternative]) -> None:
        """From lengths that just fill the card to half and double, as long as that gains; then near the best."""
        longest = max(self._counts)
        most = -(-longest // 2)
        long_ones = sum([number for chunks, number in self._counts.items() if 2 * chunks > longest])
        parts = max(2, self._sm_count // (self._heads * long_ones))
        share = math.ceil(self._heads * self._chunks / self._sm_count)
        for length in (-(-longest // parts), share):
            self._try(min(max(length, self._least), most), tried)
        filling = min(tried.values(), key=attrgetter("total_us")).segment_chunks
        if self._sequences > FEW_SEQUENCES and self._least_us > HOPELESS * self._whole.total_us:
            return
        few = len(self._counts) <= FEW
        for factor in FACTORS if few else FACTORS[:2]:
            length, losses = int(filling * factor), 0
            while losses < (2 if few else 1) and self._least <= length <= most:
                losses = 0 if self._try(length, tried) else losses + 1
                length = int(length * factor)
        for step in NEIGHBOURS[: 4 if few else 2 if self._sequences <= FEW_SEQUENCES else 1]:
            best = min(tried.values(), key=attrgetter("total_us")).segment_chunks
            for length in (int(best / step), math.ceil(best * step)):
                if self._least <= length < longest:
                    self._try(length, tried)

    def _try_near(self, start: int, tried: dict[int, Alternative]) -> None:
        """From a length up and down as long as that gains, then nearer."""
        longest = max(self._counts)
        self._try(start, tried)
        for step in STEPS:
            best = min(tried.values(), key=attrgetter("total_us")).segment_chunks
            for factor in (step, 1 / step):
                length = round(best * factor)
                while self._least <= length < longest and self._try(length, tried):
                    length = round(length * factor)

    def _try(self, segment_chunks: int, tried: dict[int, Alternative]) -> bool:
        """Predict a cut; whether that is the fastest split so far."""
        cut = self._cut(segment_chunks)
        if cut in self._seen:
            return False
        self._seen.add(cut)
        if not self._may_be_one_wave:
            longest = max(self._counts)
            length = longest_segment(longest, segment_chunks, self._least)
            if self._chain_us(length, -(-longest // length)) >= self._least_us:
                return False
        found = self._split(segment_chunks)
        if found is None:
            return False
        tried[segment_chunks] = found
        gained = found.total_us < self._least_us
        self._least_us = min(self._least_us, found.total_us)
        return gained

    def _cut(self, segment_chunks: int) -> tuple[int, ...]:
        """What tells a cut from others: where few lengths differ, into how many segments it cuts each of them."""
        if len(self._counts) > FEW:
            return (segment_chunks,)
        return tuple([segments_of(chunks, segment_chunks, self._least) for chunks in self._counts])

    def _chain_us(self, length: int, segments: int) -> float:
        """What a split takes at least whose longest segment has ``length`` chunks, of a sequence of so many segments:
        all chunks spread evenly, a CTA per sequence and head, and the chains of the longest sequence."""
        least_us = self._either_us
        for rates in self._walks:
            least_us += min([max(step_us * length, evenly_us) + ctas_us for step_us, evenly_us, ctas_us in rates])
        if self._exact_heads:
            least_us += self._state_us * length + self._scan_us * (segments - 2)
        return least_us

    def _weigh(self) -> None:
        """What `_chain_us` adds up, of the fastest options; of models that can split."""
        work = self._heads * self._chunks / self._sm_count
        pairs = self._heads * sum(self._counts.values())
        evenly_us = lambda o: work * ctas_per_head(o.schedule) * max(o.us_per_step, o.us_per_share)
        ctas_us = lambda o: pairs * ctas_per_head(o.schedule) * o.us_per_cta
        self._walks, self._state_us, self._scan_us = [], 0.0, 0.0
        for kernel in self._kernels.split:
            found = self._models.options[kernel]
            fastest_us = min([option.us_per_step for option in found])
            if kernel in WALK_SEGMENTS:
                self._walks.append([(option.us_per_step, evenly_us(option), ctas_us(option)) for option in found])
            elif kernel in WALK_SEQUENCES:
                self._scan_us += fastest_us
            else:
                self._state_us += fastest_us
        self._exact_heads = self._heads - windowed_heads(self._heads, self._share)

    def _split(self, segment_chunks: int) -> Alternative | None:
        """None where its work alone takes longer than a split that was tried."""
        split = Split(segment_chunks, self._share, self._warmup)
        items = split_items(self._counts, self._heads, self._least, split)
        total_us, least_us, bounded = self._one_wave_us(segment_chunks, items), self._either_us, {}
        for kernel in self._heaviest_first:
            found = self._bounded(kernel, chains(self._models.problems[kernel], items), items)
            bounded[kernel], least_us = found, least_us + found[0][0]
            if total_us is None and least_us >= self._least_us:
                return None
        kernels = [self._fastest(kernel, bounded[kernel]) for kernel in self._kernels.split]
        if total_us is None:
            total_us = sum([kernel.predicted_us for kernel in kernels])
        else:  # the form adds up kernels that were measured one by one
            total_us -= sum([self._constant_us(kernel) for kernel in kernels])
        return self._alternative(segment_chunks, kernels, total_us)

    def _constant_us(self, found: KernelTime) -> float:
        options = self._models.options[found.kernel]
        return next(option.us_constant for option in options if option.schedule == found.schedule)

    @property
    def _may_be_one_wave(self) -> bool:
        """Whether a split may be predicted by the one-wave form, which no sum of kernels bounds."""
        return self._models.one_wave is not None and len(self._counts) == 1

    def _one_wave_us(self, segment_chunks: int, items: SplitItems) -> float | None:
        """What the one-wave form says of equal sequences in one wave, with the windows that it was fitted with."""
        model, expected = self._models.one_wave, (EXPECTED_WINDOW_SHARE, MEASURED_WARMUP_CHUNKS)
        if not self._may_be_one_wave or (self._share, self._warmup) != expected:
            return None
        if any(sum(of.values()) > self._sm_count for of in (items.forward, items.values)):
            return None
        (chunks,) = self._counts
        longest = longest_segment(chunks, segment_chunks, self._least)
        return model.predict_us(longest, chunks / longest)
