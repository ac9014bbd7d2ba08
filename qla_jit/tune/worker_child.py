"""The process that owns a GPU during a sweep: loads, verifies and times one artifact per request.

    ← {"op": "probe"}
    ← {"op": "measure", "problem": {…}, "schedule": {…}, "path": "<artifact>", "lengths": […], "case": {…}, "seed": 0,
       "samples": 40, "verify": true}
    → stages load, data, verify, measure, recheck, then
    → {"event": "result", "status": …, "reason": …, "samples_us": […], "error": …, "verify_s": …, "measure_s": …,
       "sm_mhz": …, "memory_mhz": …, "sticky": false}

``sticky`` says that the CUDA context is lost; the process ends after that answer.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from ..config import Problem
from ..schedule import Schedule
from ..spec import KernelSpec
from . import clocks
from .child import Reply, serve
from .compile_child import reason_of
from .environment import environment_of
from .measure import Bench, Measurement, measure

EXIT_STICKY = 70


def _probe(device: int) -> None:
    """Raises when the context cannot run a kernel and bring its result back."""
    import torch

    total = float(torch.arange(1024, device=f"cuda:{device}", dtype=torch.float32).sum())
    if total != 1023 * 512:
        raise RuntimeError(f"sum(0…1023) on the card gave {total}")


class Handler:
    """State that outlives a request: the device, its cases, and the kernels loaded."""

    def __init__(self, device: int):
        self.device = device
        self._kernels: dict = {}
        self._bench: Bench | None = None
        self._uuid = ""

    def prepare(self) -> dict:
        import torch

        torch.cuda.set_device(self.device)
        _probe(self.device)
        self._uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))
        return {"environment": environment_of(self.device).as_dict()}

    def handle(self, request: dict, reply: Reply) -> None:
        if request["op"] == "probe":
            _probe(self.device)
            reply.result(status="ok")
            return
        try:
            found = self._measure(request, reply)
        except Exception as error:  # becomes the trial's status: nothing a kernel does may end the sweep
            found = Measurement("launch_error", reason_of(error))
            if self._bench is not None:
                self._bench.forget()
        reply.stage("probe")
        try:
            _probe(self.device)
        except Exception as error:
            if found.status == "ok":
                found = Measurement("launch_error", reason_of(error))
            reply.result(**asdict(found), sticky=True)
            sys.exit(EXIT_STICKY)
        reply.result(**asdict(found), sticky=False)

    def _measure(self, request: dict, reply: Reply) -> Measurement:
        reply.stage("load")
        problem = Problem.from_dict(request["problem"])
        spec = KernelSpec(problem, Schedule.from_dict(request["schedule"]))
        kernel = self._load(spec, request["path"])
        if self._bench is None:
            self._bench = Bench(f"cuda:{self.device}")
        return measure(
            self._bench,
            kernel,
            problem,
            request["lengths"],
            request["seed"],
            request["samples"],
            request["verify"],
            reply.stage,
            lambda: clocks.observe(self._uuid),
            request["case"],
        )

    def _load(self, spec: KernelSpec, path: str):
        from ..artifacts import Artifact
        from ..runtime import load

        if path not in self._kernels:
            self._kernels[path] = load(Artifact(spec=spec, path=Path(path), report={}))
        return self._kernels[path]


if __name__ == "__main__":
    handler = Handler(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    serve(handler.prepare, handler.handle)
