"""Trials side by side: as many at once as there are cards.  With one card a trial runs in the caller's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait


class Lanes:
    """``submit`` gives a Future that is done at once where there is one lane."""

    def __init__(self, count: int):
        self.count = count
        self._threads = ThreadPoolExecutor(count, "lane") if count > 1 else None

    def submit(self, call: Callable, *arguments) -> Future:
        if self._threads is not None:
            return self._threads.submit(call, *arguments)
        future: Future = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # handed to whoever asks the future; Ctrl-C is not an Exception
            future.set_exception(error)
        return future

    @staticmethod
    def finished(running: Iterable[Future], timeout_s: float | None = None) -> list[Future]:
        """Those that are done, waiting for one; in the order of submission."""
        running = list(running)
        done = wait(running, timeout_s, FIRST_COMPLETED).done
        return [future for future in running if future in done]

    def close(self) -> None:
        """Start nothing more; what runs ends with the evaluator that runs it."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
