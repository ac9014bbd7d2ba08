"""Workloads: what a schedule is measured on, written as a short text: sequence lengths and, for a split, its cut.

``1x32768/16~50`` is one sequence of 32768 tokens cut into segments of at most 16 chunks, with gates that decay on 50 %
of the value heads and are 0 on the others, which then have no windows.  Texts with a ``/`` are for the kernels of a
split alone, and those without for all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .config import SPLIT_KERNELS
from .errors import ConfigError

#: Measured when nothing else is asked: one long sequence that leaves most of the card idle, and a batch that fills it.
DEFAULT_WORKLOADS = ("8192x4", "1x8192")
#: The same for the kernels of a split: few segments and many, without windows, with some, and with nothing else.
DEFAULT_SPLIT_WORKLOADS = ("1x32768/16", "1x32768/32", "1x32768/64", "1x32768/32~0", "1x32768/32~100")
#: Value heads whose gates decay where a workload does not say, in percent: those of the gates "bench".
DECAYING_PERCENT = 75
MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class Workload:
    """Sequence lengths in tokens; segment_chunks: of the longest segment of their cut, None where nothing is cut.

    decaying_percent: of the value heads, those with gates that decay mildly; the others have g = 0.
    """

    lengths: tuple[int, ...]
    segment_chunks: int | None = None
    decaying_percent: int = DECAYING_PERCENT

    @property
    def gates(self) -> str:
        """As `numerics.make_inputs` takes them."""
        return "bench" if self.decaying_percent == DECAYING_PERCENT else f"mild:{self.decaying_percent}"

    @property
    def case(self) -> dict[str, object]:
        """What `harness.make_case` is told beyond the lengths."""
        return {} if self.segment_chunks is None else {"segment_chunks": self.segment_chunks, "gates": self.gates}


def _number(text: str, workload: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ConfigError(
            f"a workload must be `LENGTHxCOUNT`, `1xLENGTH` or `a+b+LENGTH*COUNT` of numbers >= 1, but got "
            f"{workload!r}; write for example 8192x4, 1x8192 or 4096+1024*4."
        )
    return int(text)


def _cut(text: str, workload: str) -> tuple[int, int]:
    """Segment length and decaying percent of ``16`` or ``16~50``."""
    chunks, tilde, percent = text.partition("~")
    numbers = [chunks, percent] if tilde else [chunks]
    if all(n.isascii() and n.isdigit() for n in numbers) and int(chunks) >= 1 and int(percent or 0) <= 100:
        return int(chunks), int(percent) if tilde else DECAYING_PERCENT
    raise ConfigError(
        f"what follows `/` in a workload must be CHUNKS or CHUNKS~PERCENT, with CHUNKS >= 1 and PERCENT of 0 to 100, "
        f"but got {workload!r}; write for example 1x32768/16 or 1x32768/16~50."
    )


def parse(workload: str) -> Workload:
    """The workload of ``8192x4`` (four sequences of 8192), ``1x8192`` (one of 8192), ``a+b+L*N``, each with or without
    ``/CHUNKS`` or ``/CHUNKS~PERCENT``.

    ``1xL`` is always one sequence, as in the benchmark; write N sequences of one token as ``1*N``.
    Raises ConfigError for anything else.
    """
    text, slash, after = workload.partition("/")
    if "x" in text:
        first, _, second = text.partition("x")
        length, count = _number(first, workload), _number(second, workload)
        lengths = [count] if length == 1 else [length] * count
    else:
        lengths = []
        for part in text.split("+"):
            length, star, count = part.partition("*")
            lengths += [_number(length, workload)] * (_number(count, workload) if star else 1)
    if sum(lengths) > MAX_TOKENS:
        raise ConfigError(f"`tokens <= {MAX_TOKENS}` must hold, but {workload} has {sum(lengths)}; shorten it.")
    return Workload(tuple(lengths), *(_cut(after, workload) if slash else ()))


def lengths_of(workload: str) -> list[int]:
    """Sequence lengths of a workload of whole sequences.  Raises ConfigError for one that cuts them, and as `parse`."""
    found = parse(workload)
    if found.segment_chunks is not None:
        raise ConfigError(
            f"a workload of whole sequences must be given here, but {workload} cuts them; remove what follows `/`."
        )
    return list(found.lengths)


def workload_of(kernel: str, workload: str) -> Workload:
    """`parse`, for a kernel.  Raises ConfigError where the kernel cannot be measured on it."""
    found = parse(workload)
    if suits(kernel, workload):
        return found
    if found.segment_chunks is None:
        raise ConfigError(
            f"a workload of {kernel} must cut its sequences, but got {workload!r}; write for example 1x32768/16."
        )
    raise ConfigError(
        f"a workload of {kernel} must leave its sequences whole, but got {workload!r}; remove what follows `/`."
    )


def suits(kernel: str, workload: str) -> bool:
    """Whether a kernel is measured on a workload: those of a split on what cuts sequences, others on what does not."""
    return ("/" in workload) == (kernel in SPLIT_KERNELS)


def suited(kernel: str, workloads: Iterable[str]) -> list[str]:
    """The workloads that a kernel is measured on, in their order."""
    return [workload for workload in workloads if suits(kernel, workload)]
