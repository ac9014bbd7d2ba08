import pytest
from tuning_fakes import point, trial

from qla_jit.tune.finals import best_row, finalists, noise_us, overall_row, winner

DEFAULT, FAST, FASTER, SLOW = point(), point(2, 4, "r"), point(2, 4, "q"), point(2, 0)


def raced(schedule, *samples, workload="8192x4"):
    return trial(schedule, samples_us=samples, phase="final", workload=workload)


def test_finalists_are_the_default_and_the_fastest():
    trials = [trial(DEFAULT, median=100), trial(FAST, median=80), trial(FASTER, median=79), trial(SLOW, median=300)]
    assert finalists(trials, DEFAULT, 2) == [DEFAULT, FASTER, FAST]


def test_failed_schedules_never_reach_the_finals():
    trials = [trial(DEFAULT, status="wrong"), trial(FAST, status="run_timeout"), trial(SLOW, median=300)]
    assert finalists(trials, DEFAULT) == [SLOW]


def test_later_failure_of_a_schedule_counts():
    assert finalists([trial(FAST, median=80), trial(FAST, status="wrong")], DEFAULT) == []


def test_challenger_must_beat_the_default_by_more_than_noise():
    default = raced(DEFAULT, 100.0, 104.0, 96.0, 108.0, 92.0)
    assert winner([default, raced(FAST, 99.0, 103.0, 95.0, 107.0, 91.0)], DEFAULT).schedule == DEFAULT
    assert winner([default, raced(FAST, 80.0, 84.0, 76.0, 88.0, 72.0)], DEFAULT).schedule == FAST


def test_tiny_gain_without_scatter_is_still_noise():
    default = raced(DEFAULT, 100.0, 100.0, 100.0)
    assert noise_us(default, default) == pytest.approx(0.5)
    assert winner([default, raced(FAST, 99.6, 99.6, 99.6)], DEFAULT).schedule == DEFAULT
    assert winner([default, raced(FAST, 99.0, 99.0, 99.0)], DEFAULT).schedule == FAST


def test_default_that_fails_its_race_gives_a_row_without_gain():
    row = best_row([trial(DEFAULT, status="wrong", phase="final"), raced(FAST, 80.0)], DEFAULT, 7)
    assert (row.schedule, row.default_median_us, row.gain, row.trials) == (FAST, None, None, 7)
    assert best_row([trial(DEFAULT, status="wrong", phase="final")], DEFAULT, 7) is None


def test_overall_row_is_best_on_the_geometric_mean_of_schedules_that_ran_everywhere():
    races = {
        "8192x4": [raced(DEFAULT, 100.0), raced(FAST, 50.0), raced(FASTER, 40.0)],
        "1x8192": [raced(DEFAULT, 100.0), raced(FAST, 98.0), trial(FASTER, status="wrong", phase="final")],
    }
    row = overall_row(races, DEFAULT, 9)
    assert (row.workload, row.schedule) == ("*", FAST)
    assert row.median_us == pytest.approx(70.0)
    assert row.default_median_us == pytest.approx(100.0)
    assert overall_row({"8192x4": races["8192x4"]}, DEFAULT, 9) is None
