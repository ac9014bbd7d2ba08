#!/usr/bin/env python3
"""Every schedule that the shipped database can choose, under compute-sanitizer, on a few chunks.

    python tools/sanitize.py [--tools memcheck,racecheck] [--heads 2:8] [--kernels kkt_inverse,...]      (on a card)

Per kernel and tool one process launches each schedule once, on sequences of a chunk and of three, the last of them
not whole, or cut as finely as can be, and compares the outputs with float64.  Prints a row each; exit code 1 where the
sanitizer or the comparison found something, 2 where either could not run.  Needs compute-sanitizer on PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from qla_jit import registry
from qla_jit.config import BACKWARD_KERNELS, FORWARD_KERNELS, SPLIT_KERNELS, OpConfig
from qla_jit.db import layers
from qla_jit.resources import is_feasible
from qla_jit.spec import KernelSpec

KERNELS = (*FORWARD_KERNELS, *SPLIT_KERNELS, *BACKWARD_KERNELS)
LENGTHS = (130, 1, 64)
CUT_LENGTHS = (1040, 64)
SEGMENT_CHUNKS = 8
FOUND = 9  # what compute-sanitizer is asked to exit with


def schedules_of(kernel: str, heads: tuple[int, int]) -> list[KernelSpec]:
    """The template's default, best rows of these heads, and what a plan may choose by a cost model."""
    problem = OpConfig(*heads, arch="sm90").problem(kernel)
    shipped = layers.shipped("sm90")
    chosen = [registry.select(problem).default(problem)]
    chosen += [row.schedule for row in shipped.best if row.problem == problem]
    chosen += [fit.schedule for fit in shipped.fits if fit.schedule is not None and fit.problem.kernel == kernel]
    return [KernelSpec(problem, schedule) for schedule in dict.fromkeys(chosen) if is_feasible(problem, schedule)]


def launch_all(kernel: str, heads: tuple[int, int]) -> int:
    """Inside the sanitizer: how many schedules ran; raises AssertionError where outputs are not right."""
    import torch

    from qla_jit import build, harness, runtime
    from qla_jit.artifacts import ArtifactStore

    specs = schedules_of(kernel, heads)
    cut = {"segment_chunks": SEGMENT_CHUNKS} if kernel in SPLIT_KERNELS else {}
    case = harness.make_case(specs[0].problem, CUT_LENGTHS if cut else LENGTHS, seed=3, **cut)
    for spec in specs:
        entry = runtime.load(build.ensure(spec, ArtifactStore()))
        case.poison()
        case.launch(entry)
        torch.cuda.synchronize()
        assert case.error() <= case.tolerance, f"{spec.schedule}: error {case.error():.2e}"
    return len(specs)


def command(tool: str, kernel: str, heads: str) -> list[str]:
    """The process of one kernel under one tool."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    return [*sanitizer, sys.executable, __file__, "--launch", kernel, "--heads", heads]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--heads", default="2:8", help="key and value heads")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.launch:
        print("launched", launch_all(options.launch, tuple(map(int, options.heads.split(":")))), flush=True)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer must be on PATH; it comes with the CUDA toolkit.", file=sys.stderr)
        return 2
    print("| tool | kernel | schedules | verdict |\n| --- | --- | --- | --- |", flush=True)
    worst = 0
    for tool in options.tools.split(","):
        for kernel in options.kernels.split(","):
            run = subprocess.run(command(tool, kernel, options.heads), text=True, capture_output=True)
            said = run.stdout.splitlines()
            number = next((line.split()[1] for line in said if line.startswith("launched ")), "0")
            verdict = {0: "nothing found", FOUND: "found something"}.get(run.returncode, "did not run")
            print(f"| {tool} | `{kernel}` | {number} | {verdict} |", flush=True)
            if run.returncode:
                print("\n".join([*said[-20:], *run.stderr.splitlines()[-20:]]), file=sys.stderr, flush=True)
            worst = max(worst, {0: 0, FOUND: 1}.get(run.returncode, 2))
    return worst


if __name__ == "__main__":
    sys.exit(main())
