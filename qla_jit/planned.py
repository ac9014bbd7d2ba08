"""What a plan says: how to run a batch, what was predicted for it and for what else was tried; and the same as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .schedule import Schedule


class KernelTime(NamedTuple):
    """A kernel of a plan, its schedule, and the time in µs that its cost model predicts; None where it has none.

    Of kernels behind the first the model's constant does not count: they are launched while the one before ends.
    """

    kernel: str
    schedule: Schedule
    predicted_us: float | None


class Alternative(NamedTuple):
    """One way to run a batch.  segment_chunks: None for whole sequences.  kernels: in launch order.

    total_us: the sum of the predictions, or what the one-wave form says where that is the better one.
    """

    segment_chunks: int | None
    kernels: tuple[KernelTime, ...]
    total_us: float

    @property
    def is_ordered(self) -> bool:
        """Whole sequences, the long ones first: `segment_forward` in the place of `fused_forward`."""
        return self.segment_chunks is None and self.kernels[-1].kernel == "segment_forward"


@dataclass(frozen=True)
class SplitPlan:
    """How to run a batch.  chosen: what is predicted fastest, by the margin if it is a split.

    alternatives: what else was predicted, the fastest first.  reason: why whole sequences, empty for a split.
    window_share, warmup_chunks: what was expected of the gates.  caution: why another than the fastest, else empty.
    """

    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    reason: str
    sm_count: int
    window_share: float
    warmup_chunks: int
    caution: str = ""

    @property
    def segment_chunks(self) -> int | None:
        """Chunks of the longest segment, as `split.cut_batch` takes them; None for whole sequences."""
        return self.chosen.segment_chunks

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedule of every kernel to launch, in launch order."""
        return {kernel: schedule for kernel, schedule, _ in self.chosen.kernels}

    @property
    def predicted_us(self) -> dict[str, float | None]:
        """Predicted µs of every kernel to launch."""
        return {kernel: time_us for kernel, _, time_us in self.chosen.kernels}


def describe(plan: SplitPlan, most: int = 5) -> str:
    """The plan as text: what is chosen and why, the prediction per kernel, and the ``most`` fastest alternatives."""
    chosen = plan.chosen
    lines = [f"{name_of(chosen)}, predicted {_us(chosen.total_us)}" + (f": {plan.reason}" if plan.reason else "")]
    width = max(len(kernel) for kernel, _, _ in chosen.kernels)
    lines += [f"  {kernel:<{width}} {_us(time_us):>10}  {schedule}" for kernel, schedule, time_us in chosen.kernels]
    if plan.caution:
        lines.append(f"  with caution: {plan.caution}")
    if plan.segment_chunks is not None:
        lines.append(
            f"  expected windows: {plan.window_share:.0%} of the value heads, {plan.warmup_chunks} chunks"
            if plan.warmup_chunks
            else "  no windows: every value head is exact"
        )
    if plan.alternatives:
        lines.append(f"alternatives on {plan.sm_count} SMs:")
    for other in plan.alternatives[:most]:
        parts = ", ".join(f"{kernel} {_us(time_us)}" for kernel, _, time_us in other.kernels)
        lines.append(f"  {name_of(other)}: {_us(other.total_us)} ({parts})")
    return "\n".join(lines)


def name_of(found: Alternative) -> str:
    if found.is_ordered:
        return "whole sequences, long ones first"
    chunks = found.segment_chunks
    return "whole sequences" if chunks is None else f"segments of at most {chunks} chunks"


def _us(time_us: float | None) -> str:
    return "unknown" if time_us is None else f"{time_us:.1f} µs"
