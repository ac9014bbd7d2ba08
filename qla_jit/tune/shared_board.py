"""The board of several hosts: one Optuna study per topic in a database that all of them reach (`RDBStorage`).

A claim is a RUNNING trial of the study.  Optuna numbers the trials of a study one after another, under a lock, so of
two hosts that claim a key at once the one with the lower number has it.  While a host works on its claims it sends
heartbeats; where they stop, any other host fails the trial, and the key is free again.  A claim that lasts longer than
any trial can is taken back too, heartbeat or not.  What became of a point is stored with the trial as a record of ours.

The other hosts learn of a result when they look; nothing is pushed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..db.records import Environment, Trial, parse
from ..errors import ConfigError
from .board import BoardLostError, key_of

HEARTBEAT_S = 10
GRACE_S = 60
#: Longer than all deadlines of a trial and of its compiler together.
PATIENCE_S = 1800.0
ATTEMPTS = 20
POLL_S = 1.0
INSTALL = "pip install 'qla-jit[postgresql]'"


@dataclass
class _Topic:
    """A study, the ids of this host's claims by key, and the trials that need not be heard of (again)."""

    study: object
    id: int
    mine: dict[str, int] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    seen: dict[int, float] = field(default_factory=dict)  # running trials of others, since when
    looked: float = float("-inf")
    expired: float = float("-inf")


class SharedBoard:
    """A `Board` in the database at ``url`` (SQLAlchemy's form).  Used by one thread; heartbeats have their own."""

    def __init__(
        self,
        url: str,
        heartbeat_s: int = HEARTBEAT_S,
        grace_s: int = GRACE_S,
        patience_s: float = PATIENCE_S,
        poll_s: float = POLL_S,
    ):
        import optuna

        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.url = without_password(url)
        self.poll_s = poll_s
        self._patience_s = patience_s
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._topics: dict[str, _Topic] = {}
        self._storage = self._open(url, heartbeat_s, grace_s)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), daemon=True)
        self._heart.start()

    def _open(self, url: str, heartbeat_s: int, grace_s: int):
        import sqlalchemy.exc

        try:
            for attempt in range(ATTEMPTS):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)  # of heartbeats
                        return self._optuna.storages.RDBStorage(
                            url, heartbeat_interval=heartbeat_s, grace_period=grace_s,
                            engine_kwargs={"pool_pre_ping": True},
                        )  # fmt: skip
                except sqlalchemy.exc.DBAPIError as error:
                    # Hosts that begin together all make the tables, and all but one find them made meanwhile.
                    met = isinstance(error, sqlalchemy.exc.IntegrityError)
                    met |= any(text in str(error) for text in ("already exists", "relation", "locked"))
                    if attempt + 1 == ATTEMPTS or not met:
                        raise
                    time.sleep(random.uniform(0.1, 0.5))
        except (ImportError, sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError) as error:
            raise ConfigError(
                f"`--storage` must be a database URL with an installed driver, but {self.url} gave: {error}; write "
                f"postgresql+psycopg://USER@HOST/DATABASE, and install the driver with: {INSTALL}"
            ) from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise BoardLostError(self._unreachable(error)) from error

    def _unreachable(self, error: Exception) -> str:
        said = str(error.__cause__ or error).strip().splitlines()[0][:200]
        return (
            f"the storage {self.url} must answer, but it said: {said}; what was measured is in this host's database: "
            f"start the server again, then run the same command to go on"
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        import sqlalchemy.exc

        try:
            yield
        except (sqlalchemy.exc.SQLAlchemyError, self._optuna.exceptions.StorageInternalError) as error:
            raise BoardLostError(self._unreachable(error)) from error

    def enter(self, topic: str, known: Sequence[Trial]) -> None:
        with self._explained():
            if topic not in self._topics:
                study = self._optuna.create_study(
                    storage=self._storage, study_name=topic, direction="minimize", load_if_exists=True
                )
                with self._lock:
                    self._topics[topic] = _Topic(study, self._storage.get_study_id_from_name(topic))
            entered = self._topics[topic]
            there = {t.user_attrs.get("key") for t in self._live(entered)}
            for trial in known:
                key = key_of(trial.schedule)
                if key not in there:
                    state, value = self._outcome([trial])
                    attributes = {"key": key, "owner": self._owner, "trials": _record([trial])}
                    entered.heard.add(self._create(entered, state, value, attributes))

    def _create(self, topic: _Topic, state, value: float | None, attributes: dict) -> int:
        template = self._optuna.trial.create_trial(state=state, value=value, user_attrs=attributes)
        return self._storage.create_new_trial(topic.id, template_trial=template)

    def _live(self, topic: _Topic) -> list:
        """Trials that claim or answer a key, in the order of their numbers."""
        failed = self._optuna.trial.TrialState.FAIL
        found = (t for t in topic.study.get_trials(deepcopy=False) if t.state != failed and "key" in t.user_attrs)
        return sorted(found, key=lambda t: t.number)

    def claim(self, topic: str, key: str) -> bool:
        entered = self._topics[topic]
        running, failed = self._optuna.trial.TrialState.RUNNING, self._optuna.trial.TrialState.FAIL
        with self._explained():
            self._expire(entered)
            if any(t.user_attrs["key"] == key for t in self._live(entered)):
                return False
            trial_id = self._create(entered, running, None, {"key": key, "owner": self._owner})
            self._storage.record_heartbeat(trial_id)
            first = next((t for t in self._live(entered) if t.user_attrs["key"] == key), None)
            if first is None or first._trial_id != trial_id:
                self._set_state(trial_id, failed)
                return False
            with self._lock:
                entered.mine[key] = trial_id
            return True

    def _set_state(self, trial_id: int, state, values: list[float] | None = None) -> bool:
        """False where another host has ended the trial already."""
        try:
            return self._storage.set_trial_state_values(trial_id, state, values)
        except self._optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _expire(self, topic: _Topic) -> None:
        """Fail the trials of hosts that are gone."""
        now = time.monotonic()
        if now - topic.expired < self.poll_s:
            return
        topic.expired = now
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._optuna.storages.fail_stale_trials(topic.study)
        state = self._optuna.trial.TrialState
        others = {t._trial_id for t in self._live(topic) if t.state == state.RUNNING} - set(topic.mine.values())
        topic.seen = {trial_id: topic.seen.get(trial_id, now) for trial_id in others}
        for trial_id, since in topic.seen.items():
            if now - since > self._patience_s:
                self._set_state(trial_id, state.FAIL)

    def publish(self, topic: str, key: str, trials: Sequence[Trial]) -> bool:
        entered = self._topics[topic]
        with self._lock:
            trial_id = entered.mine.pop(key)
        state, value = self._outcome(trials)
        with self._explained():
            try:
                self._storage.set_trial_user_attr(trial_id, "trials", _record(trials))
            except self._optuna.exceptions.UpdateFinishedTrialError:
                return False
            accepted = self._set_state(trial_id, state, None if value is None else [value])
        if accepted:
            entered.heard.add(trial_id)
        return accepted

    def _outcome(self, trials: Sequence[Trial]) -> tuple[object, float | None]:
        value = min((t.median_us for t in trials if t.status == "ok"), default=None)
        state = self._optuna.trial.TrialState
        return (state.PRUNED if value is None else state.COMPLETE), value

    def release(self, topic: str, key: str) -> None:
        with self._lock:
            trial_id = self._topics[topic].mine.pop(key, None)
        if trial_id is not None:
            with self._explained():
                self._set_state(trial_id, self._optuna.trial.TrialState.FAIL)

    def news(self, topic: str) -> list[list[Trial]]:
        entered, now = self._topics[topic], time.monotonic()
        if now - entered.looked < self.poll_s:
            return []
        entered.looked = now
        with self._explained():
            live = self._live(entered)
        found, answered = [], set()
        for trial in live:
            key = trial.user_attrs["key"]
            if trial.state.is_finished() and "trials" in trial.user_attrs and key not in answered:
                answered.add(key)  # of two answers, which only a host that was thought dead can give, the first counts
                if trial._trial_id not in entered.heard:
                    entered.heard.add(trial._trial_id)
                    found.append(_trials(trial.user_attrs["trials"]))
        return found

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            with self._lock:
                claims = [trial_id for topic in self._topics.values() for trial_id in topic.mine.values()]
            for trial_id in claims:
                # A storage that does not answer is reported where it is needed next, by the thread that uses it.
                with contextlib.suppress(Exception):
                    self._storage.record_heartbeat(trial_id)

    def close(self) -> None:
        self._stop.set()
        self._heart.join(timeout=5)
        for name, topic in self._topics.items():
            for key in list(topic.mine):
                with contextlib.suppress(BoardLostError):  # without heartbeats it is free in a minute all the same
                    self.release(name, key)
        self._topics.clear()
        self._storage.remove_session()
        self._storage.engine.dispose()


def without_password(url: str) -> str:
    """The URL as it may be stored and shown; libpq's PGPASSWORD or ~/.pgpass give the password where it is used."""
    head, at, tail = url.rpartition("@")
    scheme, separator, user = head.partition("://")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{tail}" if at else url


def _record(trials: Sequence[Trial]) -> str:
    return json.dumps([{**t.as_dict(), "environment": t.environment.as_dict()} for t in trials])


def _trials(text: str) -> list[Trial]:
    found = []
    for values in json.loads(text):
        environment = parse(Environment.from_dict, values["environment"])
        values["environment"] = environment.id
        found.append(parse(Trial.from_dict, values, {environment.id: environment}))
    return found
