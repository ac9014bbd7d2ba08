#!/usr/bin/env python3
"""A small Gated DeltaNet language model, trained twice from one start: by the operator, and by its float64 reference.

    python tools/train_lm.py [--steps 300] [--device cuda] [--seed 0] [--out FILE.jsonl] [--plot FILE.png]

Both runs have the same weights to begin with, the same batches and fp32 everywhere else, so what sets their losses
apart is the operator: bf16 q, k, v in the kernels of a card, or the fp32 chunk form on the CPU.  The text is made here;
it can be predicted well only by what a state remembers.  Writes both curves as JSONL, with provenance, and a picture.
Exits with 1 if the final losses, means of the last 20 steps, differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from qla_jit import chunk_gated_delta_rule
from qla_jit.reference import chunk_reference

ROOT = Path(__file__).resolve().parent.parent
KEYS, VALUES, FILL = "abcdefgh", "01234567", " .,;"
VOCABULARY = KEYS + VALUES + FILL
LAST_STEPS, LARGEST_DIFFERENCE = 20, 0.01
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step; tokens: of all sequences of a step together, each ``shortest`` to ``longest``."""

    width: int = 256
    layers: int = 2
    heads: int = 2
    value_heads: int = 4
    head_dim: int = 128
    taps: int = 4
    tokens: int = 2048
    shortest: int = 16
    longest: int = 512


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end: ids, targets ``[1, T]`` int64; recalls ``[1, T]``, whether the target can be recalled.

    positions: ``[1, T]``, of a token in its sequence.  bounds: ``[N + 1]`` int32 on the device, lengths the same as
    ints on the host.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    recalls: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    lengths: tuple[int, ...]


Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Batch], torch.Tensor]


class Corpus:
    """Text such as ``c5.,a0 c5;``: every sequence has a digit of its own for each letter, and repeats it every time.

    A digit can be predicted by recall alone, the filler between pairs by a Markov chain, and a letter not at all.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        # What may follow a character: filler, and last, as likely as most of it together, the next pair.
        self._chain = {char: [*(self._random.random() ** 2 for _ in FILL), 1.5] for char in VALUES + FILL}

    def sequence(self, length: int) -> tuple[str, list[bool]]:
        """A text, and for each of its characters whether the text before it tells it."""
        draw, digits, text, recalls = self._random, {}, "", []
        while len(text) < length:
            key = draw.choice(KEYS)
            recalls += [False, key in digits]
            text += key + digits.setdefault(key, draw.choice(VALUES))
            while fill := draw.choices([*FILL, ""], self._chain[text[-1]])[0]:
                text += fill
                recalls.append(False)
        return text[:length], recalls[:length]

    def batch(self, sizes: Sizes, device: str) -> Batch:
        """The next batch; the last sequence is cut where the tokens end."""
        ids, targets, recalls, positions, lengths = [], [], [], [], [0]
        while lengths[-1] < sizes.tokens:
            length = min(self._random.randint(sizes.shortest, sizes.longest), sizes.tokens - lengths[-1])
            text, known = self.sequence(length + 1)
            codes = [VOCABULARY.index(char) for char in text]
            ids += codes[:-1]
            targets += codes[1:]
            recalls += known[1:]
            positions += range(length)
            lengths.append(lengths[-1] + length)
        rows = (torch.tensor(x, device=device)[None] for x in (ids, targets, recalls, positions))
        return Batch(*rows, torch.tensor(lengths, dtype=torch.int32, device=device), tuple(lengths))


class GatedDeltaNet(nn.Module):
    """The layer of Qwen3.5: a short convolution, normalised q and k, gates from A_log and dt_bias, a gated output.

    exp(A_log) is uniform in 0 … 16 to begin with, softplus(dt_bias) log-uniform in 0.001 … 0.1.
    """

    def __init__(self, sizes: Sizes, operator: Operator):
        super().__init__()
        self.operator, self.dim, self.value_heads = operator, sizes.head_dim, sizes.value_heads
        keys, values = sizes.heads * sizes.head_dim, sizes.value_heads * sizes.head_dim
        self.parts = [keys, keys, values]
        self.project = nn.Linear(sizes.width, sum(self.parts) + values, bias=False)
        self.gates = nn.Linear(sizes.width, 2 * sizes.value_heads, bias=False)
        self.taps = nn.Parameter(torch.randn(sizes.taps, sum(self.parts)) / sizes.taps**0.5)
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads).uniform_(0, 16).log())
        rates = torch.empty(sizes.value_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(rates.expm1().log())
        self.norm = nn.RMSNorm(sizes.head_dim, eps=1e-6)
        self.out = nn.Linear(values, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x: ``[1, T, width]``."""
        mixed, z = self.project(x).split([sum(self.parts), self.parts[2]], -1)
        mixed = F.silu(causal_convolution(mixed, self.taps, batch.positions))
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in mixed.split(self.parts, -1))
        a, b = self.gates(x).chunk(2, -1)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        o = self.operator(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, b.sigmoid(), batch)
        return self.out((self.norm(o) * F.silu(z.view_as(o))).flatten(2))


def causal_convolution(x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``Σ_i taps[i] x[t − i]`` per channel within each sequence.  x: ``[1, T, C]``.  taps: ``[n, C]``."""
    shifted = (F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] * (positions >= i)[..., None] for i in range(len(taps)))
    return sum(tap * row for tap, row in zip(taps, shifted))


class LanguageModel(nn.Module):
    """Embedding, layers of [norm, Gated DeltaNet, norm, MLP], and a head with the weights of the embedding."""

    def __init__(self, sizes: Sizes, operator: Operator):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), sizes.width)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)
        self.layers = nn.ModuleList(
            nn.ModuleList((
                nn.RMSNorm(sizes.width, eps=1e-6),
                GatedDeltaNet(sizes, operator),
                nn.RMSNorm(sizes.width, eps=1e-6),
                nn.Sequential(
                    nn.Linear(sizes.width, 2 * sizes.width), nn.GELU(), nn.Linear(2 * sizes.width, sizes.width)
                ),
            ))
            for _ in range(sizes.layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of every token, ``[1, T]``, in nats."""
        x = self.embedding(batch.ids)
        for norm, mixer, mlp_norm, mlp in self.layers:
            x = x + mixer(norm(x), batch)
            x = x + mlp(mlp_norm(x))
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.ids)


def by_operator(q, k, v, g, beta, batch: Batch) -> torch.Tensor:
    """The public operator, of bf16 q, k and v on a card."""
    if q.is_cuda:
        q, k, v = (x.bfloat16() for x in (q, k, v))
    given = dict(cu_seqlens=batch.bounds, cu_seqlens_cpu=batch.lengths)
    return chunk_gated_delta_rule(q, k, v, g, beta, **given)[0].float()


def by_reference(q, k, v, g, beta, batch: Batch) -> torch.Tensor:
    """Autograd's way through the float64 chunk form."""
    return chunk_reference(q, k, v, g, beta, cu_seqlens=batch.lengths)[0].float()


OPERATORS: dict[str, Operator] = {"qla_jit": by_operator, "float64": by_reference}


def train(operator: Operator, sizes: Sizes, steps: int, device: str, seed: int) -> list[tuple[float, float]]:
    """The mean loss of each step, over all tokens and over those that can be recalled, in nats."""
    torch.manual_seed(seed)
    model, corpus = LanguageModel(sizes, operator).to(device), Corpus(seed)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    share = lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (1.0 - 0.9 * step / steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    found = []
    for _ in range(steps):
        batch = corpus.batch(sizes, device)
        losses = model(batch)
        optimizer.zero_grad()
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses = losses.detach()
        found.append(torch.stack([losses.mean(), losses[batch.recalls].mean()]))
    return [tuple(row) for row in torch.stack(found).tolist()]


def final_loss(curve: list[tuple[float, float]]) -> float:
    return statistics.fmean(loss for loss, _ in curve[-LAST_STEPS:])


def write(path: Path, curves: dict[str, list[tuple[float, float]]], run: dict) -> None:
    """One line of provenance, then one a step: the loss and the loss of what can be recalled, by operator."""
    rows = [
        {"kind": "row", "step": step, **{name: [round(x, 5) for x in row] for name, row in zip(curves, row_of_step)}}
        for step, row_of_step in enumerate(zip(*curves.values()))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [run, *rows]))


def plot(path: Path, curves: dict[str, list[tuple[float, float]]], title: str) -> None:
    """Both curves over each other: all tokens, and those that can be recalled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, curve), width, style in zip(curves.items(), (3.0, 1.2), ("-", "--")):
        for part, (label, colour) in enumerate((("all tokens", "tab:blue"), ("digits to recall", "tab:orange"))):
            shade = colour if style == "-" else "black"
            axes.plot([row[part] for row in curve], style, color=shade, linewidth=width, label=f"{name}, {label}")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def provenance(sizes: Sizes, options: argparse.Namespace) -> dict:
    on_card = options.device.startswith("cuda")
    return {
        "kind": "run", "date": date.today().isoformat(), "commit": options.commit or _commit(),
        "gpu": torch.cuda.get_device_name(options.device) if on_card else "none", "torch": torch.__version__,
        "command": " ".join(["tools/train_lm.py", *sys.argv[1:]]), "seed": options.seed, **vars(sizes),
        "unit": "nats: all tokens, digits to recall",
    }  # fmt: skip


def _commit() -> str:
    try:
        found = subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None, sizes: Sizes | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--head-dim", type=int, default=Sizes.head_dim, choices=(64, 128))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "perf" / "train_lm.jsonl")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "perf" / "train_lm.png")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    options = parser.parse_args(arguments)
    sizes = sizes or Sizes(head_dim=options.head_dim)
    curves = {}
    for name, operator in OPERATORS.items():
        began = time.perf_counter()
        curves[name] = train(operator, sizes, options.steps, options.device, options.seed)
        print(f"{name}: {time.perf_counter() - began:.1f} s, final loss {final_loss(curves[name]):.4f}", flush=True)
    finals = {name: final_loss(curve) for name, curve in curves.items()}
    difference = abs(finals["qla_jit"] - finals["float64"]) / finals["float64"]
    run = provenance(sizes, options) | {"final": finals, "relative_difference": difference}
    write(options.out, curves, run)
    plot(options.plot, curves, f"Two layers of Gated DeltaNet; final losses differ by {difference:.2%}")
    print(f"relative difference {difference:.2%}, {LARGEST_DIFFERENCE:.0%} allowed")
    return int(not difference <= LARGEST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
