"""The child's end of a `Channel`: a loop that answers one JSON line with JSON lines.

The protocol keeps the original stdout for itself; whatever a compiler or kernel prints goes to stderr, which the parent
keeps for the reason of a failure.  The child dies with its parent, so that a killed sweep leaves no process on a GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


class Reply:
    """Writes protocol lines: ``stage`` announces what begins now, ``result`` ends the request."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def send(self, **message) -> None:
        os.write(self._descriptor, (json.dumps(message) + "\n").encode())

    def stage(self, name: str) -> None:
        self.send(event="stage", name=name)

    def result(self, **values) -> None:
        self.send(event="result", **values)


def serve(prepare: Callable[[], dict], handle: Callable[[dict, Reply], None]) -> None:
    """Announce ``ready`` with what `prepare` returns, then handle requests until stdin closes.

    An exception of `handle` ends the process: the parent sees the death and its stderr, and starts a fresh one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the channel
    reply = Reply(os.dup(1))
    os.dup2(2, 1)
    reply.send(event="ready", **prepare())
    for line in sys.stdin:
        handle(json.loads(line), reply)
