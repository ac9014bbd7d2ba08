#!/usr/bin/env python3
"""How far gradients are from float64, beside those of PyTorch's chunk form with operands in the same 16 bits.

    python tools/gradient_errors.py [--out FILE.jsonl]      (on a card)

Per batch and gradient: relative error of the kernels, of the chunk form, and their ratio.  Batches: no decay to violent
decay, log gates −exp(A_log) softplus(…) with A_log of 0 to 16 by value head as Qwen3.5 draws them (uniform in 0 … 16
before the logarithm), value heads of one to four per key head, ragged lengths, and a sequence that the plan splits.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch

from qla_jit import chunk_gated_delta_rule
from qla_jit.backward_harness import gradient_of_outputs
from qla_jit.chunk_form import chunk_form
from qla_jit.numerics import Inputs, make_inputs, relative_error
from qla_jit.reference import chunk_reference

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
#: Name, key and value heads, lengths, gates of `make_inputs`; "model" as the docstring says.
BATCHES = (
    ("no decay", (2, 8), (1000, 64, 37), "none"),
    ("mild decay", (2, 8), (1000, 64, 37), "mild"),
    ("benchmark gates", (2, 8), (1000, 64, 37), "bench"),
    ("gates of a model", (4, 16), (1000, 64, 37), "model"),
    ("violent decay", (2, 8), (1000, 64, 37), "violent"),
    ("one value head a key head", (4, 4), (700, 65), "bench"),
    ("split, no decay", (2, 8), (8192, 900), "none"),
    ("split, gates of a model", (2, 8), (8192, 900), "model"),
)
LARGEST_RATIO = 1.5


def batch_of(heads: tuple[int, int], lengths: tuple[int, ...], gates: str, seed: int, device: str) -> Inputs:
    """Inputs of a batch, its gates too."""
    x = make_inputs(lengths, *heads, device=device, seed=seed, gates="bench" if gates == "model" else gates)
    if gates == "model":
        gen = torch.Generator(device).manual_seed(seed + 2)
        scale = 16 * torch.rand(heads[1], generator=gen, device=device)
        x.g.copy_(-scale * torch.nn.functional.softplus(torch.randn(x.g.shape, generator=gen, device=device) - 4))
    return x


def gradients(outputs, leaves, do, dfinal) -> list[torch.Tensor]:
    """Of `NAMES`, for gradients of o and of the final state."""
    o, final = outputs
    return torch.autograd.grad((o, final), leaves, (do.to(o.dtype), dfinal.to(final.dtype)))


def errors(x: Inputs, seed: int) -> dict[str, tuple[float, float]]:
    """{gradient: (relative error of the kernels, of the chunk form)}."""
    do, dfinal = gradient_of_outputs(x, seed)
    leaves = lambda dtype=None: [t.detach().to(dtype or t.dtype).requires_grad_() for t in (*x.tokens, x.initial_state)]
    exact, own, peer = leaves(torch.float64), leaves(), leaves()
    want = gradients(chunk_reference(*exact[:5], x.scale, exact[5], cu_seqlens=x.cu_host), exact, do, dfinal)
    found = gradients(
        chunk_gated_delta_rule(
            *own[:5], x.scale, own[5], True, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host
        ),
        own, do, dfinal,
    )  # fmt: skip
    other = gradients(
        chunk_form(*peer[:5], x.scale, peer[5], cu_seqlens=x.cu_host, operand_dtype=x.q.dtype), peer, do, dfinal
    )
    return {name: (relative_error(a, c), relative_error(b, c)) for name, a, b, c in zip(NAMES, found, other, want)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSONL, a line per batch")
    parser.add_argument("--commit", default="", help="what is measured")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the kernels need a CUDA card, and torch.cuda.is_available() is False")
    print("| batch | " + " | ".join(NAMES) + " |\n|" + " --- |" * (len(NAMES) + 1))
    lines, worst = [], 0.0
    for seed, (name, heads, lengths, gates) in enumerate(BATCHES):
        found = errors(batch_of(heads, lengths, gates, seed, "cuda"), seed + 1)
        worst = max(worst, *(own / other for own, other in found.values()))
        cells = (f"{own:.1e} ({own / other:.2f})" for own, other in found.values())
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        lines.append({"batch": name, "heads": heads, "lengths": lengths, "gates": gates, "errors": found})
    print(f"in brackets: over the chunk form's, at most {worst:.2f}; {LARGEST_RATIO} allowed")
    if options.out:
        run = {"date": str(date.today()), "commit": options.commit, "gpu": torch.cuda.get_device_name()}
        options.out.write_text("".join(json.dumps(run | line) + "\n" for line in lines), encoding="utf-8")
    sys.exit(worst > LARGEST_RATIO)


if __name__ == "__main__":
    main()
