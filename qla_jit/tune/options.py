"""The options that several verbs of ``qla-tune`` share, and the problems that they name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..arch import ARCHS
from ..config import DTYPES, FORWARD_KERNELS, KERNELS, STATE_DTYPES, OpConfig
from ..errors import ConfigError
from ..workload import parse, suited, suits, workload_of
from .space import plan_problems

#: Heads of the models that are tuned when none are named: Qwen3.5/3.6 and Qwen3-Next at TP 1 to 8.
DEFAULT_HEADS = "2:8,4:16,8:32,16:64,16:48,16:32,16:16,32:32"

Arch = Annotated[
    str,
    typer.Option(
        help="Architecture to tune for: sm90, sm100, sm103, sm120, sm121.", autocompletion=lambda: list(ARCHS)
    ),
]
Heads = Annotated[
    str,
    typer.Option(
        help="H:HV query/key and value heads, several separated by commas.",
        autocompletion=lambda: DEFAULT_HEADS.split(","),
    ),
]
HeadDim = Annotated[str, typer.Option(help="Head dimension, or K:V where they differ.")]
Kernels = Annotated[
    str,
    typer.Option(
        help=f"Kernels separated by commas, of {', '.join(KERNELS)}; by default {', '.join(FORWARD_KERNELS)}, of the "
        "shipped list the backward's too.",
        autocompletion=lambda: list(KERNELS),
    ),
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float16.", autocompletion=lambda: list(DTYPES))]
StateDtype = Annotated[str, typer.Option(help="float32 or bfloat16.", autocompletion=lambda: list(STATE_DTYPES))]
GateDtype = Annotated[str, typer.Option(help="Of g, for input_activation: float32, bfloat16 or float16.")]
BetaDtype = Annotated[str, typer.Option(help="Of beta, for input_activation: float32, bfloat16 or float16.")]
StateVFirst = Annotated[bool, typer.Option("--state-v-first", help="States are [N, HV, V, K].")]
ChunkSize = Annotated[str, typer.Option(help="Chunk sizes separated by commas; by default what the templates offer.")]
DbPath = Annotated[Path | None, typer.Option("--db", help="Tuning database; QLA_DB or your data folder by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def _pair(text: str, option: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) in (1, 2) and all(p.isascii() and p.isdigit() for p in parts):
        return int(parts[0]), int(parts[-1])
    raise ConfigError(f"`{option}` must be N or N:M, but got {text!r}; write for example 16:64.")


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def devices_of(text: str) -> tuple[int, ...]:
    """CUDA device numbers of ``0,1,…``; ConfigError for anything else and for one named twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdigit() for p in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"`--devices` must be different numbers separated by commas, but got {text!r}; write 0,1.")
    return tuple(int(p) for p in parts)


def _names(text: str, allowed: tuple[str, ...], default: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(names_in(text)) or default
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(f"`{option}` must be of {', '.join(allowed)}, but got {', '.join(unknown)}; remove those.")
    return names


def kernels_of(text: str) -> tuple[str, ...]:
    """Kernels separated by commas, those of the forward where none is named; ConfigError for an unknown one."""
    return _names(text, KERNELS, FORWARD_KERNELS, "--kernels")


def workloads_of(text: str, kernels: Iterable[str], whole: Sequence[str], split: Sequence[str]) -> tuple[str, ...]:
    """Workloads separated by commas, each for the kernels that it suits; where none is named, the defaults ``whole``
    and ``split`` as far as the kernels take them.

    Raises ConfigError for what cannot be read, for a workload that no kernel takes and for a kernel without one.
    """
    kernels, named = tuple(dict.fromkeys(kernels)), names_in(text)
    if not named:
        return tuple(w for w in (*whole, *split) if any(suits(kernel, w) for kernel in kernels))
    for workload in named:
        parse(workload)
        if kernels and not any(suits(kernel, workload) for kernel in kernels):
            workload_of(kernels[0], workload)
    for kernel in kernels:
        if not suited(kernel, named):
            workload_of(kernel, named[0])
    return tuple(named)


def chunk_sizes_of(text: str) -> list[int] | None:
    """Chunk sizes separated by commas, None where none is named."""
    return [_pair(c, "--chunk-size")[0] for c in text.split(",")] if text else None


def problems_of(
    arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size, gate_dtype="float32",
    beta_dtype="float32",
):  # fmt: skip
    """The problems that the options of ``run`` and ``show`` name; ConfigError for what cannot be read."""
    dim_k, dim_v = _pair(head_dim, "--head-dim")
    configs = [
        OpConfig(
            *_pair(h, "--heads"), dim_k, dim_v, dtype, state_dtype, state_v_first, arch, False, gate_dtype, beta_dtype
        )
        for h in heads.split(",")
    ]
    return plan_problems(configs, kernels_of(kernels), chunk_sizes_of(chunk_size))
