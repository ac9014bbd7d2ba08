#!/usr/bin/env python3
"""What the plan's choices cost against the best of all measured plans: whole sequences, or segments of any length.

    python tools/split_regret.py measure --out FILE [--batches core,random,backward] [--limit N]      (on a card)
    python tools/split_regret.py report FILE
    python tools/split_regret.py replan FILE

measure: per batch the operator's time, CUDA-graph median with a cold L2, for whole sequences, for those with the long
ones first where the plan asks for that, for the segments that it chose, and for segment lengths around them; the plan
that is told the share of windows runs by its own schedules, as `N told` where these are others.  One JSON line a batch,
as soon as it is known, so an interrupted run keeps what it has.  Batches: `core`, the head configurations and layouts
of the benchmark's core set; `random`, 60 ragged batches of 1 to 64 sequences, 64 to 65,536 tokens each (131,072 in
all), 2 to 64 value heads and any share of heads that decay, drawn from a fixed seed; `backward`, the backward of the
layouts and head configurations that training is measured with.

report: regret, the plan's time over the best of its batch; the same of the plan that is told the share of heads with
windows, and of never splitting.

replan: the same of what would be planned now, by the times in FILE: that of a length that was not measured lies between
those of its neighbours.  It needs no card.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

CORE_HEADS = ((2, 8), (4, 16), (8, 32), (16, 64), (16, 48))
BACKWARD_HEADS = ((2, 8), (4, 16), (8, 32), (16, 32), (16, 64))
CORE_LENGTHS = ((32768,), (8192,), (2048,), (16384, 16384), (4096, 28672), (8192,) * 4, (1024,) * 8)
RANDOM_BATCHES, RANDOM_SEED = 60, 20
RANDOM_HEADS = ((1, 2), (1, 4), (2, 8), (4, 16), (8, 24), (8, 32), (16, 48), (16, 64))
MOST_TOKENS = 131_072
#: Segment lengths that are tried, as factors of the planned one, or of an even share where the plan keeps all whole.
FACTORS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
WINDOW = 1e-4  # the operator's default
FLUSH_BYTES = 256 << 20
REPEATS = 9


def random_batches() -> list[dict]:
    """Heads, lengths and percent of decaying heads of every random batch; the same in every run."""
    draw = random.Random(RANDOM_SEED)
    found = []
    for _ in range(RANDOM_BATCHES):
        count = min(64, int(2 ** draw.uniform(0, 6.3)))
        longest = min(65_536, MOST_TOKENS // count)
        lengths = [int(64 * (longest / 64) ** draw.random()) for _ in range(count)]
        heads = draw.choice(RANDOM_HEADS)
        window = draw.choice(["exact", WINDOW])
        found.append({"heads": heads, "lengths": lengths, "percent": draw.randrange(0, 101, 5), "window": window})
    return found


def core_batches() -> list[dict]:
    """The core set, with windows and without."""
    return [
        {"heads": heads, "lengths": list(lengths), "percent": 75, "window": window}
        for heads in CORE_HEADS
        for lengths in CORE_LENGTHS
        for window in ("exact", WINDOW)
    ]


def backward_batches() -> list[dict]:
    """The backward of the layouts of the core set."""
    return [
        {"heads": heads, "lengths": list(lengths), "percent": 75, "window": window, "pass": "backward"}
        for heads in BACKWARD_HEADS
        for lengths in CORE_LENGTHS
        for window in ("exact", WINDOW)
    ]


def segment_lengths(planned: int | None, lengths: list[int], heads: int, sm_count: int, least: int) -> list[int]:
    """Chunks of a segment that are worth a measurement, ascending."""
    longest = -(-max(lengths) // 64)
    share = sum(-(-length // 64) for length in lengths) * heads / sm_count
    centre = planned or max(share, 1.0)
    tried = {max(least, round(centre * factor)) for factor in FACTORS} | ({planned} if planned else set())
    return sorted(length for length in tried if length < longest)


def name_of(plan) -> str:
    """Of what a plan chooses, as in a row's times."""
    return "ordered" if plan.chosen.is_ordered else str(plan.segment_chunks or "whole")


def names_of(plans: list) -> list[str]:
    """Of what the plan and the told one choose; the latter is named apart where its schedules are others, because a
    length alone does not say how it runs."""
    first, second = plans
    apart = second.schedules != first.schedules and second.segment_chunks is not None
    return [name_of(first), name_of(second) + " told" * apart]


def plans_of(models, batch: dict, sm_count: int) -> list:
    """The plan of a batch, and that which is told the share of heads with windows."""
    from qla_jit.split_plan import plan_split

    shares = (None, batch["percent"] / 100)
    return [plan_split(models, batch["lengths"], sm_count, batch["window"], share) for share in shares]


def tried_lengths(problem, batch: dict, plans: list, sm_count: int) -> list[int]:
    """Chunks of the segments that are measured: those of the plans, and some around the first."""
    from qla_jit.segments import least_segment_chunks

    planned = plans[0].segment_chunks
    around = segment_lengths(planned, batch["lengths"], batch["heads"][1], sm_count, least_segment_chunks(problem))
    return sorted({*around, *(plan.segment_chunks for plan in plans if plan.segment_chunks is not None)})


def forward_runs(batch: dict, x, device, sm_count: int) -> tuple[dict[str, Callable], list, list[str]]:
    """(what runs the forward of a batch in every way that is measured, its plans, which ways they choose).

    The plans run by their own schedules, and all other lengths by those of the first.
    """
    from qla_jit import dispatch
    from qla_jit.config import SPLIT_KERNELS, OpConfig

    operator, window = dispatch.compiled(OpConfig(*batch["heads"])), batch["window"]
    plans = plans_of(operator._models, batch, sm_count)
    names = names_of(plans)
    tokens = [t[0] for t in x.tokens]

    def split(chunks: int, plan):
        cut = plan.segment_chunks is not None
        schedules = {name: plan.schedules[name] for name in SPLIT_KERNELS} if cut else None
        return operator.split(x.cu_host, chunks, device, window, schedules)

    forwards = {"whole": operator.choose(x.cu_host, device)}
    for plan, name, share in zip(plans, names, (None, batch["percent"] / 100)):
        if plan.chosen.is_ordered:
            forwards[name] = operator.ordered(x.cu_host, device, plan.schedules["segment_forward"])
        elif plan.segment_chunks is None:
            forwards[name] = operator.choose(x.cu_host, device, True, window, share)
        else:
            forwards[name] = split(plan.segment_chunks, plan)
    for chunks in tried_lengths(operator.config.problem("segment_forward"), batch, plans, sm_count):
        if str(chunks) not in forwards and (forward := split(chunks, plans[0])) is not None:
            forwards[str(chunks)] = forward
    run = lambda forward: lambda: operator(*tokens, x.cu_seqlens, forward=forward)
    return {name: run(forward) for name, forward in forwards.items()}, plans, names


def backward_runs(batch: dict, x, device, sm_count: int) -> tuple[dict[str, Callable], list, list[str]]:
    """The same of its backward, all by the schedules of the first plan that has them."""
    from qla_jit import dispatch
    from qla_jit.backward_harness import gradient_of_outputs
    from qla_jit.config import BACKWARD, OpConfig

    operator, window, lengths = dispatch.compiled_backward(OpConfig(*batch["heads"])), batch["window"], batch["lengths"]
    models = operator._models
    plans = plans_of(models, batch, sm_count)
    ways = [way for plan in plans for way in (plan.chosen, *plan.alternatives)]
    schedules = {name: models.options[name][0].schedule for name in (*BACKWARD.whole, *BACKWARD.split)}
    for is_whole in (True, False):
        first = next((way for way in ways if (way.segment_chunks is None) == is_whole), None)
        schedules |= {kernel: schedule for kernel, schedule, _ in first.kernels} if first else {}
    walks = {"whole": operator.whole(schedules)}
    for chunks in tried_lengths(operator.config.problem("segment_backward"), batch, plans, sm_count):
        split = operator.split(lengths, chunks, device, window, schedules)
        if split.segments.is_cut:
            walks[str(chunks)] = split
    tokens, do = [t[0] for t in x.tokens], gradient_of_outputs(x)[0][0]
    run = lambda walk: lambda: operator(*tokens, x.cu_seqlens, x.scale, do, walks=walk)
    return {name: run(walk) for name, walk in walks.items()}, plans, [name_of(plan) for plan in plans]


def graph_us(run: Callable, flush) -> float:
    """Median time of a captured run with a cold L2 cache."""
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS + 2):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return round(statistics.median(times[2:]), 3)


def measure(options: argparse.Namespace) -> None:
    import torch

    from qla_jit.numerics import make_inputs

    sets = {"core": core_batches, "random": random_batches, "backward": backward_batches}
    batches = [batch for name in options.batches.split(",") for batch in sets[name]()][: options.limit]
    properties = torch.cuda.get_device_properties("cuda")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    with open(options.out, "a", encoding="utf-8") as out:
        for number, batch in enumerate(batches):
            heads, lengths = batch["heads"], batch["lengths"]
            gates = f"mild:{batch['percent']}"
            x = make_inputs(lengths, *heads, device="cuda", draw_on="cuda", seed=number, gates=gates)
            runs_of = backward_runs if batch.get("pass") == "backward" else forward_runs
            runs, (planned, hinted), names = runs_of(batch, x, device, properties.multi_processor_count)
            us = {name: graph_us(run, flush) for name, run in runs.items()}
            row = batch | {
                "us": us,
                "planned": names[0],
                "predicted_us": planned.chosen.total_us,
                "hinted": names[1],
                "hinted_us": hinted.chosen.total_us,
                "gpu": properties.name,
            }
            print(json.dumps(row), file=out, flush=True)
            print(
                f"{number + 1}/{len(batches)} heads {heads[0]}/{heads[1]}, {len(lengths)} sequences: {us}", flush=True
            )


def regrets(rows: list[dict], choice) -> list[float]:
    """Time of what ``choice`` names in each row over the best of the row, less 1."""
    return [row["us"][choice(row)] / min(row["us"].values()) - 1 for row in rows]


def report(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in Path(options.file).read_text(encoding="utf-8").splitlines()]
    choices = {
        "the plan": lambda row: row["planned"],
        "the plan, told the share of windows": lambda row: row["hinted"],
        "never split": lambda row: "whole",
    }
    print(f"{len(rows)} batches, {sum(len(row['us']) for row in rows)} plans measured")
    print("| choice | mean regret | worst |\n| --- | --- | --- |")
    for name, choice in choices.items():
        found = regrets(rows, choice)
        print(f"| {name} | {statistics.fmean(found):.1%} | {max(found):.1%} |")
    for name, choice, predicted in (("the plan", "planned", "predicted_us"), ("told the share", "hinted", "hinted_us")):
        slower = max(row["us"][row[choice]] / row["us"]["whole"] - 1 for row in rows)
        print(f"{name}, against whole sequences: at worst {slower:+.1%}")
        errors = sorted(abs(row[predicted] / row["us"][row[choice]] - 1) for row in rows if row.get(predicted))
        if errors:
            ninth = errors[len(errors) * 9 // 10]
            print(f"{name}, prediction error: median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}")


def time_of(us: dict[str, float], name: str) -> float | None:
    """What a choice takes, by `names_of`; None where nothing like it was measured."""
    plain = name.removesuffix(" told")
    if name in us or not plain.isdigit():
        return us.get(name)
    length, measured = int(plain), sorted((int(other), time_us) for other, time_us in us.items() if other.isdigit())
    for (below, lower_us), (above, upper_us) in zip(measured, measured[1:]):
        if below <= length <= above:
            return lower_us + (upper_us - lower_us) * (length - below) / (above - below)
    return min(measured, key=lambda other: abs(other[0] - length))[1] if measured else None


def replan(options: argparse.Namespace) -> None:
    from qla_jit.config import BACKWARD, FORWARD, OpConfig
    from qla_jit.db import open_db
    from qla_jit.split_models import SplitModels

    rows = [json.loads(line) for line in Path(options.file).read_text(encoding="utf-8").splitlines()]
    db, found = open_db(), {name: [] for name in ("the plan", "told the share")}
    for row in rows:
        kernels = BACKWARD if row.get("pass") == "backward" else FORWARD
        models = SplitModels.of(OpConfig(*row["heads"], arch="sm90"), db, kernels=kernels)
        for name, way in zip(found, names_of(plans_of(models, row, options.sm_count))):
            found[name].append((time_of(row["us"], way), min(row["us"].values()), row["us"]["whole"]))
    print("| choice | batches | mean regret | worst | against whole sequences, at worst |\n|" + " --- |" * 5)
    for name, times in found.items():
        known = [times_us for times_us in times if times_us[0] is not None]
        lost, slower = ([us[0] / us[i] - 1 for us in known] for i in (1, 2))
        mean = statistics.fmean(lost)
        print(f"| {name} | {len(known)} of {len(rows)} | {mean:.1%} | {max(lost):.1%} | {max(slower):+.1%} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--out", required=True)
    measuring.add_argument("--batches", default="core,random")
    measuring.add_argument("--limit", type=int)
    measuring.set_defaults(run=measure)
    reporting = verbs.add_parser("report")
    reporting.add_argument("file")
    reporting.set_defaults(run=report)
    replanning = verbs.add_parser("replan")
    replanning.add_argument("file")
    replanning.add_argument("--sm-count", type=int, default=132, help="of the card that FILE was measured on")
    replanning.set_defaults(run=replan)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
