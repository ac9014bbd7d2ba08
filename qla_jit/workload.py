"""Workloads: the sequence lengths that a schedule is measured on, written as a short text."""

from __future__ import annotations

from .errors import ConfigError

#: Measured when nothing else is asked: one long sequence that leaves most of the card idle, and a batch that fills it.
DEFAULT_WORKLOADS = ("8192x4", "1x8192")
MAX_TOKENS = 1 << 24


def _number(text: str, workload: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ConfigError(
            f"a workload must be `LENGTHxCOUNT`, `1xLENGTH` or `a+b+LENGTH*COUNT` of numbers >= 1, but got "
            f"{workload!r}; write for example 8192x4, 1x8192 or 4096+1024*4."
        )
    return int(text)


def lengths_of(workload: str) -> list[int]:
    """Sequence lengths of ``8192x4`` (four of 8192), ``1x8192`` (one of 8192), ``a+b+L*N``.

    ``1xL`` is always one sequence, as in the benchmark; write N sequences of one token as ``1*N``.
    Raises ConfigError for anything else.
    """
    if "x" in workload:
        first, _, second = workload.partition("x")
        length, count = _number(first, workload), _number(second, workload)
        lengths = [count] if length == 1 else [length] * count
    else:
        lengths = []
        for part in workload.split("+"):
            length, star, count = part.partition("*")
            lengths += [_number(length, workload)] * (_number(count, workload) if star else 1)
    if sum(lengths) > MAX_TOKENS:
        raise ConfigError(f"`tokens <= {MAX_TOKENS}` must hold, but {workload} has {sum(lengths)}; shorten it.")
    return lengths
