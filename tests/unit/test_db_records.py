import math

import pytest
from tuning_fakes import ENVIRONMENT, best, trial

from qla_jit.db.records import Environment, Trial
from qla_jit.errors import DatabaseError


def test_median_and_iqr_come_from_the_samples():
    t = trial(samples_us=(1.0, 2.0, 3.0, 4.0, 100.0))
    assert t.median_us == 3.0
    assert t.iqr_us == 2.0


def test_uid_is_a_digest_of_everything_stored():
    assert trial().uid == trial().uid
    assert len({trial().uid, trial(registers=1).uid, trial(workload="1x8192").uid, trial(phase="final").uid}) == 4


def test_integers_and_floats_of_equal_value_have_one_uid():
    assert trial(samples_us=(1, 2, 3), error=0).uid == trial(samples_us=(1.0, 2.0, 3.0), error=0.0).uid


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"status": "fine"}, "status in"),
        ({"phase": "warmup"}, "phase in"),
        ({"samples_us": ()}, "samples_us if and only if"),
        ({"error": math.nan}, "finite numbers"),
        ({"samples_us": (1.0, math.inf)}, "finite numbers"),
    ],
)
def test_impossible_trial_is_refused_with_the_invariant(changes, named):
    with pytest.raises(DatabaseError, match=named):
        trial(**changes)


def test_failure_without_a_reason_is_refused():
    with pytest.raises(DatabaseError, match="a reason"):
        trial(status="wrong", reason="")


def test_best_row_refuses_a_time_of_nothing():
    with pytest.raises(DatabaseError, match="positive"):
        best(median=0.0)


def test_gain_is_default_over_best():
    assert best(median=80.0).gain == 1.25
    assert best(default_median_us=None).gain is None


def test_record_of_another_version_is_refused():
    with pytest.raises(DatabaseError, match="colour"):
        Environment.from_dict({**ENVIRONMENT.as_dict(), "colour": "red"})
    values = trial().as_dict()
    del values["status"]
    with pytest.raises(DatabaseError, match=r"missing \['status'\]"):
        Trial.from_dict(values, {ENVIRONMENT.id: ENVIRONMENT})
