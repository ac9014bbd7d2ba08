"""A spawned, killable process that answers JSON lines.

The process leads its own group, so killing it also kills the compilers that it started.  Every wait has a deadline.
`ChannelError` says how a conversation ended: ``timeout`` (the group is killed), ``died``, or ``garbage``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

STDERR_TAIL_BYTES = 2000
KILL_WAIT_S = 30.0


class ChannelError(Exception):
    """The other side did not answer; ``kind`` is timeout, died or garbage, ``stage`` what it had announced last."""

    def __init__(self, kind: str, message: str, stage: str):
        super().__init__(message)
        self.kind = kind
        self.stage = stage


class Channel:
    """One child process.  ``command`` is its argv; ``python_module(name)`` makes one for a module of this package."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self._buffer = b""
        self._killed = False
        self.stage = "start"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping) -> None:
        """Send one request; a dead child is noticed by the `receive` that follows."""
        self.stage = "request"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write((json.dumps(message) + "\n").encode())
            self._process.stdin.flush()

    def receive(self, deadlines: Mapping[str, float]) -> dict:
        """The next message that is no stage.  ``deadlines``: seconds per stage, ``""`` for stages not named."""
        entered = time.monotonic()
        while True:
            seconds = deadlines.get(self.stage, deadlines.get("", 60.0))
            message = self._read_message(entered + seconds, seconds)
            if message["event"] != "stage":
                return message
            self.stage, entered = str(message.get("name")), time.monotonic()

    def _read_message(self, until: float, seconds: float) -> dict:
        line = self._read_line(until, seconds)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("event"), str):
            self.kill()
            raise ChannelError("garbage", f"an event in JSON was expected, but got {line[:200]!r}", self.stage)
        return message

    def _read_line(self, until: float, seconds: float) -> bytes:
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.kill()
                    raise ChannelError("timeout", f"no answer within {seconds:g} s in stage {self.stage}", self.stage)
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise ChannelError("died", self._obituary(), self.stage)
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self) -> str:
        self.kill()
        code = self._process.returncode
        if code is None:
            return f"process {self.pid} could not be killed in stage {self.stage}"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip()
        return f"process ended with {how} in stage {self.stage}" + (f": …{tail}" if tail else "")

    def kill(self) -> None:
        """End the whole process group now; harmless when it has ended."""
        if self._killed:  # once only: the group's id may belong to somebody else afterwards
            return
        self._killed = True
        # Whoever closed its end is about to exit by itself: its own exit code says more than our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self._at_end() else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process stuck inside the driver may not die; the probe that precedes the next trial finds out.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)

    def _at_end(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout.fileno(), selectors.EVENT_READ)
            return bool(selector.select(0))

    def close(self) -> None:
        """Kill the group and free the pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()


def python_module(name: str, *arguments: str) -> list[str]:
    """argv that runs a module of this package in a fresh interpreter of the same installation."""
    return [sys.executable, "-m", name, *arguments]
