"""The coordinator's view of the process that owns a GPU: one request at a time, each with deadlines, never trusted.

Whatever a kernel does (hang, crash, lose the context, print garbage) ends as a status.  The process is then replaced
and probed before the next trial; when that fails three times in a row, `WorkerLostError` stops the sweep, because
every further trial would record the card's failure as the schedule's.
"""

from __future__ import annotations

import math

from ..db.records import STATUSES, Environment, parse
from ..errors import QlaError
from .channel import Channel, ChannelError, python_module

START_S = 180.0
DEADLINES_S = {"load": 60.0, "data": 300.0, "verify": 60.0, "measure": 60.0, "recheck": 60.0, "probe": 20.0, "": 60.0}
MAX_START_FAILURES = 3


class WorkerLostError(QlaError, RuntimeError):
    """No healthy worker process can be started on the device."""


def _checked(answer: dict) -> dict:
    """The answer, or ``crashed`` where a process with damaged memory answered nonsense."""
    for name in ("sm_mhz", "memory_mhz"):
        if not isinstance(answer.get(name), int):
            answer.pop(name, None)
    samples, error = answer.get("samples_us") or (), answer.get("error")
    numbers = [*samples, 0.0 if error is None else error]
    sound = all(isinstance(n, (int, float)) and math.isfinite(n) and n >= 0 for n in numbers)
    if answer.get("status") in STATUSES and sound and bool(samples) == (answer["status"] == "ok"):
        return answer
    return {"status": "crashed", "reason": f"worker answered nonsense: {str(answer)[:200]}"}


class Worker:
    """A respawning GPU process.  ``command`` and ``deadlines`` are replaced in tests."""

    def __init__(
        self,
        device: int = 0,
        command: list[str] | None = None,
        deadlines: dict[str, float] | None = None,
        start_s: float = START_S,
    ):
        self._command = command or python_module("qla_jit.tune.worker_child", str(device))
        self._deadlines = {**DEADLINES_S, **(deadlines or {})}
        self._start_s = start_s
        self._channel: Channel | None = None
        self._environment: Environment | None = None
        self._suspect = False
        self._stopped = False
        self.restarts = -1  # the first start is none

    @property
    def environment(self) -> Environment:
        """What the card and its software are; starts the process."""
        self.ensure()
        return self._environment

    def ensure(self) -> None:
        """A healthy process, started and probed if need be."""
        reasons = []
        while len(reasons) < MAX_START_FAILURES:
            if self._stopped:
                raise WorkerLostError("the sweep has ended.")
            try:
                if self._channel is None or not self._channel.alive:
                    self._start()
                if self._suspect:
                    self._channel.send({"op": "probe"})
                    self._channel.receive(self._deadlines)
                    self._suspect = False
                return
            except ChannelError as error:
                reasons.append(str(error))
                self.close()
        raise WorkerLostError(
            f"a process that can use the GPU must start, but {MAX_START_FAILURES} in a row failed, the last with: "
            f"{reasons[-1]}; check the card with nvidia-smi, then run the same command again to go on."
        )

    def _start(self) -> None:
        self.close()
        self._channel = Channel(self._command)
        self.restarts += 1
        if self._stopped:  # meanwhile, by another thread
            self._channel.kill()
        hello = self._channel.receive({"": self._start_s})
        if hello["event"] != "ready":
            raise ChannelError("garbage", f"ready was expected, but got {str(hello)[:200]}", "start")
        self._environment = parse(Environment.from_dict, hello.get("environment"))

    def measure(self, request: dict) -> dict:
        """Run one request; returns status, reason, samples_us, error, clocks and times whatever happens."""
        self.ensure()
        try:
            self._channel.send({"op": "measure", **request})
            answer = self._channel.receive(self._deadlines)
        except ChannelError as error:
            self._suspect = True
            self.close()
            if error.kind == "timeout":
                return {"status": "run_timeout", "reason": f"{error}"}
            return {"status": "crashed", "reason": f"worker: {error}"}
        if answer.pop("sticky", False):
            self.close()
        if answer.get("status") != "ok":
            self._suspect = True
        return _checked(answer)

    def stop(self) -> None:
        """Kill the process and start none again; may be called while another thread waits for an answer."""
        self._stopped = True
        channel = self._channel
        if channel is not None:
            channel.kill()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
