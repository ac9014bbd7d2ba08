"""Activities of a sweep: who gets how many lanes, in which order they come, and what ends them."""

from concurrent.futures import Future

import pytest

from qla_jit.errors import CacheError
from qla_jit.tune.activities import InTurn, SideBySide, run
from qla_jit.tune.board import Alone
from qla_jit.tune.lanes import Lanes
from qla_jit.tune.worker import WorkerLostError


class Trials:
    """An activity of ``left`` trials, which are done as soon as they are asked for; logs what happens to it."""

    def __init__(self, name, left, log, error=None):
        self.name, self.left, self.log, self.error = name, left, log, error
        self.running = {}
        self.closed = 0

    def advance(self, lanes):
        self.log.append((self.name, lanes))
        while self.left and len(self.running) < lanes:
            self.left -= 1
            future = Future()
            future.set_result(self.name)
            self.running[future] = self.left

    def finish(self, future):
        del self.running[future]
        if self.error is not None:
            raise self.error

    def stop(self):
        self.left = 0

    @property
    def is_done(self):
        return not self.left and not self.running

    def close(self):
        self.closed += 1


@pytest.fixture
def log():
    return []


def lanes_of(log, name):
    return [lanes for which, lanes in log if which == name]


def ran(activity, lanes):
    run(activity, Lanes(lanes), Alone())


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_side_by_side_shares_all_lanes_and_takes_what_follows_when_one_is_free(log, lanes):
    parts = [Trials(name, left, log) for name, left in zip("abcd", (5, 1, 3, 0))]
    ran(SideBySide(iter(parts)), lanes)
    assert [part.closed for part in parts] == [1] * 4 and not any(part.left for part in parts)
    firsts = list(dict.fromkeys(name for name, _ in log))
    assert firsts == list("abcd")
    assert lanes_of(log, "a")[0] == (2 if lanes == 5 else 1)  # of five lanes and four parts, the first has two
    if lanes == 1:
        assert log == sorted(log)  # one after another


def test_the_last_one_has_every_lane(log):
    ran(SideBySide(iter([Trials("a", 1, log), Trials("b", 9, log)])), 4)
    assert lanes_of(log, "b")[-1] == 4


def test_nothing_is_made_before_its_turn(log):
    made = []

    def parts():
        for name in "abc":
            made.append(name)
            yield Trials(name, 2, log)

    both = SideBySide(parts())
    both.advance(2)
    assert made == ["a", "b"] and len(both.running) == 2 and not both.is_done


def test_in_turn_each_begins_when_the_one_before_is_done(log):
    parts = {name: Trials(name, left, log) for name, left in (("a", 3), ("b", 0), ("c", 2))}
    ended = []
    ran(InTurn(iter([lambda part=part: part for part in parts.values()]), lambda: ended.append(len(log))), 2)
    assert [name for name, _ in log] == sorted(name for name, _ in log)
    assert [part.closed for part in parts.values()] == [1] * 3 and ended == [len(log)]


@pytest.mark.parametrize("error", [WorkerLostError("no card is left"), CacheError("disk full")])
def test_what_ends_this_host_ends_everything_when_what_ran_is_taken_in(log, error):
    bad, other, later = Trials("bad", 2, log, error), Trials("other", 5, log), Trials("later", 1, log)
    ended = []
    turn = InTurn(iter([lambda: bad, lambda: later]), lambda: ended.append("bad"))
    with pytest.raises(type(error), match=str(error)):
        ran(SideBySide(iter([turn, other, later])), 2)
    assert not bad.running and not other.running and not lanes_of(log, "later") and not ended
    assert lanes_of(log, "other")


def test_another_error_is_raised_at_once(log):
    with pytest.raises(ValueError, match="not recorded"):
        ran(Trials("a", 3, log, ValueError("not recorded")), 1)
