"""The cards of this host, one killable process each: a request goes to one that is free, if it can be to that which
has its data.

A card that can no longer be used is dropped with its reason, and the request that it had goes to another.  A request
during which two cards were lost is not tried on a third: then the kernel is to blame, and it ends as ``crashed``.  Each
process belongs to a thread of its own that lives as long as the process, because Linux kills a child with the *thread*
that started it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ..db.records import Environment
from ..errors import ConfigError
from .worker import Worker, WorkerLostError

MAX_CARDS_PER_REQUEST = 2


class Data(NamedTuple):
    """What a card makes before it can answer: some of it per problem, the rest per workload of that problem."""

    problem: str
    workload: str


def data_of(request: dict) -> Data:
    """Equal for requests that a card answers with the same data: those of one problem and workload."""
    return Data(str(request.get("problem")), str([request.get(name) for name in ("lengths", "case")]))


class Cards:
    """Workers that answer requests side by side.  Safe to share between threads."""

    def __init__(self, workers: Iterable[Worker]):
        self._workers = list(workers)
        self._threads = {worker: ThreadPoolExecutor(1, "card") for worker in self._workers}
        self._free = list(self._workers)
        self._data: dict[Worker, Data] = {}  # what the last request of each was about
        self._changed = threading.Condition()
        self._closed = False
        self._environment: Environment | None = None
        self._reasons: list[str] = []

    @property
    def count(self) -> int:
        """Cards that were not lost."""
        return len(self._workers)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def lost(self) -> list[str]:
        """Why each lost card was lost."""
        return list(self._reasons)

    @property
    def environment(self) -> Environment:
        """What the cards and their software are; starts all of them.  ConfigError where they differ."""
        if self._environment is None:
            started = [(w, self._threads[w].submit(lambda w=w: w.environment)) for w in self._workers]
            found: dict[Worker, Environment] = {}
            for worker, future in started:
                try:
                    found[worker] = future.result()
                except WorkerLostError as error:
                    self._drop(worker, error)
                    if not self._workers:
                        raise
            first = next(iter(found.values()))
            if other := next((e for e in found.values() if e != first), None):
                raise ConfigError(
                    f"the cards of one sweep must be equal, but got {first} with {first.sm_count} SMs and {other} with "
                    f"{other.sm_count}; sweep them one after another (--devices)."
                )
            self._environment = first
        return self._environment

    def measure(self, request: dict) -> dict:
        """Run one request on a free card; WorkerLostError when none is left."""
        blamed: list[dict] = []
        while True:
            try:
                with self.held(data_of(request)) as run:
                    answer = run(request)
                    if answer["status"] in ("crashed", "run_timeout", "launch_error") and self.count > 1:
                        blamed.append(answer)
                        run(None)  # is it the kernel or the card?  A healthy card means the kernel.
                    return answer
            except WorkerLostError:
                if self._closed or not (self._workers or blamed):
                    raise
                if len(blamed) >= MAX_CARDS_PER_REQUEST or (blamed and not self._workers):
                    reason = f"{len(blamed)} cards were lost while it ran, the last after: {blamed[-1]['reason']}"
                    return {"status": "crashed", "reason": reason}

    @contextmanager
    def held(self, data: Data | None = None) -> Iterator[Callable[[dict | None], dict]]:
        """A card for several requests in a row, one that is free: call the result with a request, or with None to have
        the card probed.  data: of `data_of` the requests.  A WorkerLostError inside drops the card."""
        worker = self._take(data)
        thread = self._threads[worker]

        def run(request: dict | None) -> dict:
            if request is None:
                thread.submit(worker.ensure).result()
                return {"status": "ok"}
            answer = thread.submit(worker.measure, request).result()
            if self._closed:
                raise WorkerLostError("the sweep has ended.")
            return answer

        try:
            yield run
        except WorkerLostError as error:
            self._drop(worker, error)
            raise
        finally:
            self._give(worker)

    def _take(self, data: Data | None) -> Worker:
        with self._changed:
            while not self._free:
                if not self._workers or self._closed:
                    break
                self._changed.wait()
            if self._closed or not self._workers:
                raise WorkerLostError(self._reasons[-1] if self._reasons else "no card is left.")
            worker = min(self._free, key=lambda w: (self._distance(w, data), self._workers.index(w)))
            self._free.remove(worker)
            if data is not None:
                self._data[worker] = data
            return worker

    def _distance(self, worker: Worker, data: Data | None) -> int:
        """How little of ``data`` a card has; most for one whose own would be lost to a problem that is not done."""
        own = self._data.get(worker)
        if own is None or data is None:
            return 2
        return 0 if own == data else 1 if own.problem == data.problem else 3

    def forget(self, request: dict) -> None:
        """No request of this problem will come any more, so that its card is the first that another may have."""
        with self._changed:
            ended = data_of(request).problem
            self._data = {worker: data for worker, data in self._data.items() if data.problem != ended}

    def _give(self, worker: Worker) -> None:
        with self._changed:
            if worker in self._workers:
                self._free.append(worker)
            self._changed.notify_all()

    def _drop(self, worker: Worker, error: WorkerLostError) -> None:
        with self._changed:
            if worker in self._workers and not self._closed:
                self._workers.remove(worker)
                self._reasons.append(str(error))
            if worker in self._free:
                self._free.remove(worker)
            self._changed.notify_all()

    def close(self) -> None:
        """End all processes; requests that wait for one end with WorkerLostError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._threads:
            worker.stop()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        for worker in self._threads:
            worker.close()
