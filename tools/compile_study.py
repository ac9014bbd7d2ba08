"""Where the time of compiling a kernel goes, and what several kernels in one translation unit would save.

    python tools/compile_study.py [--heads 16:64] [--kernels 8] [--rounds 3] [--out docs/perf/compile_study.jsonl]

Lowers the first schedules of `fused_forward`, then gives their CUDA texts to nvcc one at a time, and as one text with
the headers once.  CPU seconds of this process and its children, of the fastest round; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from qla_jit import build, registry, toolchain
from qla_jit.arch import get_arch
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import OpConfig
from qla_jit.spec import KernelSpec
from qla_jit.tune.space import enumerate_space

ROOT = Path(__file__).resolve().parent.parent
_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')


def joined(texts: list[str]) -> str:
    """One translation unit: each include once, and each text with its own kernel name and namespace."""
    includes: dict[str, None] = {}
    bodies = []
    for i, text in enumerate(texts):
        lines = text.splitlines()
        includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        for name in set(_ENTRY.findall(body)):
            body = re.sub(rf"\b{name}\b", f"{name}_{i}", body)
        bodies.append(re.sub(r"\bqla\b(?=::| \{)", f"qla_{i}", body))
    return "\n".join([*includes, *bodies])


def headers_alone(text: str) -> str:
    """A text's includes and an empty kernel."""
    return "\n".join([*re.findall("^#include.*", text, re.M), "__global__ void empty() {}\n"])


def measured(what: Callable[[], object], rounds: int) -> dict:
    """CPU and wall seconds of the round that took the least CPU."""
    found = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), _cpu_s()
        what()
        found.append((_cpu_s() - cpu, time.perf_counter() - wall))
    cpu, wall = min(found)
    return {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _build_all(specs: list[KernelSpec]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            build.build(spec, ArtifactStore(folder))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16:64")
    parser.add_argument("--kernels", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "perf" / "compile_study.jsonl")
    options = parser.parse_args(arguments)
    problem = OpConfig(*map(int, options.heads.split(":"))).problem("fused_forward")
    template = registry.select(problem).name
    points = [p for p in enumerate_space(problem).points if p.template == template][: options.kernels]
    specs = [KernelSpec(problem, point) for point in points]
    texts = [build.lower(spec, compile_device=False).source for spec in specs]
    target = get_arch(problem.arch).target

    def nvcc(*given: str) -> None:
        for text in given:
            build.nvcc_cubin(text, target, [])

    steps = {
        "whole builds": lambda: _build_all(specs),
        "lowering": lambda: [build.lower(spec, compile_device=False) for spec in specs],
        "nvcc, one text at a time": lambda: nvcc(*texts),
        "nvcc, all in one text": lambda: nvcc(joined(texts)),
        "nvcc, headers alone": lambda: nvcc(headers_alone(texts[0])),
    }
    rows = [{"kind": "row", "step": name, **measured(step, options.rounds)} for name, step in steps.items()]
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    run = {
        "kind": "run", "date": date.today().isoformat(), "commit": commit, "kernels": len(specs), "template": template,
        "heads": options.heads, "command": " ".join(["tools/compile_study.py", *sys.argv[1:]]),
        **toolchain.current().as_dict(), "unit": "seconds for all kernels together",
    }  # fmt: skip
    options.out.write_text("".join(json.dumps(line) + "\n" for line in [run, *rows]))
    for row in rows:
        print(f"{row['cpu_s']:7.2f} s CPU {row['wall_s']:7.2f} s wall  {row['step']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
