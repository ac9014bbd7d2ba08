#!/usr/bin/env python3
"""Device memory of a training step of the operator alone, per token, beside its peers where they are installed.

    python tools/train_memory.py [--providers qla_jit,fla,flash_qla] [--heads 16:32,8:32,2:8] [--lengths 8192,32768]
                                 [--out FILE.jsonl]                                             (on a card)

Bytes above what the inputs q, k, v, g, beta, the initial state and the gradients of o and of the final state take, of
torch's allocator, divided by tokens:

kept: after the forward, outputs included: what waits for the backward.
peak: at any time of forward and backward, outputs and gradients of all six inputs included.

Head dims 128, bf16, states in fp32, one sequence.  A provider that is missing or fails has a note.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from qla_jit.numerics import Inputs, make_inputs

ROOT = Path(__file__).resolve().parent.parent
HEADS, LENGTHS, HEAD_DIM = "16:32,8:32,2:8", "8192,32768", 128

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # q, k, v, g, beta, initial state → o, final state


@dataclass(frozen=True)
class Row:
    """Bytes per token of one provider; inputs: what the tensors that are handed over take, for comparison."""

    provider: str
    heads: int
    value_heads: int
    length: int
    inputs: float
    kept: float | None = None
    peak: float | None = None
    note: str = ""


def qla_jit(x: Inputs) -> Forward:
    from qla_jit import chunk_gated_delta_rule

    return _with_states(chunk_gated_delta_rule, x, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host)


def fla(x: Inputs) -> Forward:
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA would hand the call to flash_qla, which has a row of its own
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _with_states(chunk_gated_delta_rule, x, cu_seqlens=x.cu_seqlens.long())


def flash_qla(x: Inputs) -> Forward:
    from flash_qla import chunk_gated_delta_rule

    return _with_states(chunk_gated_delta_rule, x, cu_seqlens=x.cu_seqlens)


def _with_states(operator: Callable, x: Inputs, **lengths) -> Forward:
    return lambda *tokens: operator(
        *tokens[:5], scale=x.scale, initial_state=tokens[5], output_final_state=True, **lengths
    )


PROVIDERS: dict[str, Callable[[Inputs], Forward]] = {"qla_jit": qla_jit, "fla": fla, "flash_qla": flash_qla}


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def step_bytes(forward: Forward, leaves: list[torch.Tensor], given: list[torch.Tensor]) -> tuple[int, int]:
    """(kept, peak) of a step after one that compiles, tunes and fills caches; given: the gradients of the outputs."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = forward(*leaves)
        kept = torch.cuda.memory_allocated() - before
        gradients = torch.autograd.grad(outputs, leaves, given)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del outputs, gradients
    return kept, peak


def measure(provider: str, heads: int, value_heads: int, length: int) -> Row:
    x = make_inputs((length,), heads, value_heads, HEAD_DIM, HEAD_DIM, device="cuda", gates="bench", draw_on="cuda")
    leaves = [t.requires_grad_() for t in (*x.tokens, x.initial_state)]
    given = [torch.randn_like(x.v), torch.randn_like(x.initial_state)]
    row = dict(provider=provider, heads=heads, value_heads=value_heads, length=length)
    row["inputs"] = bytes_of([*leaves, *given]) / length
    if find_spec(provider) is None:
        return Row(**row, note="not installed")
    try:
        kept, peak = step_bytes(PROVIDERS[provider](x), leaves, given)
    except torch.AcceleratorError:
        raise  # the card's context is lost, and with it every later row
    except Exception as error:
        return Row(**row, note=f"{type(error).__name__}: {error}"[:200])
    return Row(**row, kept=kept / length, peak=peak / length)


def table(rows: Iterable[Row]) -> str:
    """Markdown: one line a row, KB (1024 bytes) per token."""
    kilobytes = lambda size: "–" if size is None else f"{size / 1024:.1f}"
    lines = ["| heads | tokens | provider | inputs | kept | peak | |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        sizes = " | ".join(map(kilobytes, (r.inputs, r.kept, r.peak)))
        lines.append(f"| {r.heads}/{r.value_heads} | {r.length} | {r.provider} | {sizes} | {r.note} |")
    return "\n".join(lines)


def provenance(commit: str | None) -> dict:
    if commit is None:
        try:
            git = ("git", "rev-parse", "--short", "HEAD")
            commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
        except FileNotFoundError:
            commit = "unknown"
    return {
        "kind": "run", "date": date.today().isoformat(), "commit": commit, "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "peers": {name: _version(name) for name in ("flash-linear-attention", "flash-qla")},
        "command": " ".join(["tools/train_memory.py", *sys.argv[1:]]), "unit": "bytes per token",
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--heads", default=HEADS, help="q/k heads : value heads, …")
    parser.add_argument("--lengths", default=LENGTHS, help="tokens of the one sequence, …")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "perf" / "train_memory.jsonl")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    options = parser.parse_args(arguments)
    providers = options.providers.split(",")
    if unknown := sorted(set(providers) - set(PROVIDERS)):
        parser.error(f"providers must be of {tuple(PROVIDERS)}, but got {unknown}")
    if not torch.cuda.is_available():
        parser.error("a CUDA card must be present to measure its memory, but torch.cuda.is_available() is False")
    rows = [
        measure(name, *map(int, heads.split(":")), int(length))
        for heads in options.heads.split(",")
        for length in options.lengths.split(",")
        for name in providers
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [provenance(options.commit), *({"kind": "row", **asdict(row)} for row in rows)]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
