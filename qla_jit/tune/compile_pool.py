"""Compiles kernels in parallel, in processes that see no GPU.

Each slot is a thread with one `Channel` of its own instead of a worker of a ProcessPoolExecutor: an executor cannot
kill one hanging job without breaking the pool for all others.  A job that overruns its deadline is killed with the
compilers it started and becomes ``compile_timeout``; its slot goes on with a fresh process.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ..errors import CacheError, CompilerMissingError
from ..spec import KernelSpec
from .channel import Channel, ChannelError, python_module

COMMAND = python_module("qla_jit.tune.compile_child")
TIMEOUT_S = 300.0
START_S = 120.0  # the first import of TileLang on a machine compiles its bytecode


@dataclass(frozen=True)
class Compiled:
    """How one compile ended.

    status: ok, infeasible, compile_error, compile_timeout or crashed.  path: folder of the artifact.  report:
    registers, shared memory ….  source_sha256: digest of its CUDA text, by which equal kernels are recognised.
    """

    status: str
    reason: str = ""
    path: str = ""
    report: dict = field(default_factory=dict)
    source_sha256: str = ""
    seconds: float = 0.0


class CompilePool:
    """``submit(spec)`` gives a Future of `Compiled`; equal specs share one.  Close it to kill what still runs."""

    def __init__(
        self,
        jobs: int | None = None,
        store: str | Path | None = None,
        timeout_s: float = TIMEOUT_S,
        command: list[str] | None = None,
    ):
        self.jobs = jobs or max(1, min(32, os.cpu_count() or 1))
        self._store = None if store is None else str(store)
        self._timeout_s = timeout_s
        self._command = command or COMMAND
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._futures: dict[str, Future] = {}
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(self.jobs)]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: KernelSpec, urgent: bool = False) -> Future:
        """Queue a kernel (once); ``urgent`` goes before everything that is not."""
        with self._lock:
            future = self._futures.get(spec.digest)
            if future is None:
                future = self._futures[spec.digest] = Future()
                self._queue.put((not urgent, len(self._futures), spec, future))
            return future

    @property
    def queued(self) -> int:
        """Kernels submitted and not yet finished."""
        with self._lock:
            return sum(not future.done() for future in self._futures.values())

    def _work(self, slot: int) -> None:
        while True:
            _, _, spec, future = self._queue.get()
            if spec is None or self._closed:
                future.cancel()
                return
            if not future.set_running_or_notify_cancel():
                continue
            started = time.monotonic()
            try:
                compiled = self._compile(slot, spec)
            except Exception as error:  # handed to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(replace(compiled, seconds=time.monotonic() - started))

    def _compile(self, slot: int, spec: KernelSpec) -> Compiled:
        try:
            channel = self._channel(slot)
            channel.send({"problem": spec.problem.as_dict(), "schedule": spec.schedule.as_dict(), "store": self._store})
            answer = channel.receive({"": self._timeout_s})
        except ChannelError as error:
            self._discard(slot)
            status = "compile_timeout" if error.kind == "timeout" else "crashed"
            return Compiled(status, f"compiler: {error}")
        if answer.get("status") == "compiler_missing":
            raise CompilerMissingError(answer["reason"])
        if answer.get("status") == "host_error":
            raise CacheError(
                f"kernels must be writable to {self._store or 'the kernel cache'} and its temporary folder, but "
                f"{answer['reason']}; free space or set QLA_CACHE_DIR and TMPDIR, then run the same command to go on."
            )
        if answer.get("status") not in ("ok", "compile_error", "infeasible"):
            self._discard(slot)
            return Compiled("crashed", f"compiler answered {str(answer)[:200]}")
        known = {f.name for f in fields(Compiled)}
        return Compiled(**{name: value for name, value in answer.items() if name in known})

    def _channel(self, slot: int) -> Channel:
        channel = self._channels.get(slot)
        if channel is None:
            channel = Channel(self._command, {"CUDA_VISIBLE_DEVICES": ""})
            with self._lock:
                closed = self._closed
                self._channels[slot] = channel
            if closed:
                channel.close()
            channel.receive({"": START_S})
        return channel

    def _discard(self, slot: int) -> None:
        with self._lock:
            channel = self._channels.pop(slot, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Cancel what waits, kill what runs.  Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels.values())
            futures = list(self._futures.values())
        for future in futures:
            future.cancel()
        for channel in channels:
            channel.kill()
        for i in range(self.jobs):
            self._queue.put((False, -1 - i, None, Future()))
        for thread in self._threads:
            thread.join(timeout=5)
        for slot in list(self._channels):
            self._discard(slot)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_) -> None:
        self.close()
