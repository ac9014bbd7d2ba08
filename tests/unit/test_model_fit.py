"""The cost-model fit on made-up rows of known coefficients: noise, outliers, too few rows, the wrong form."""

import json
import random
import re

import pytest
from tuning_fakes import ENVIRONMENT, cost_model, fake_template, point, problem, trial, use_templates

from qla_jit import cli
from qla_jit.db import Database, Store
from qla_jit.db.lookup import family
from qla_jit.errors import DatabaseError
from qla_jit.model import features, robust
from qla_jit.model.fit import MIN_ROWS, best_segment, fit_models, residuals
from qla_jit.model.observation import observations
from qla_jit.schedule import Schedule
from qla_jit.tune.fit_commands import fit_database
from qla_jit.workload import lengths_of

WORKLOADS = ("8192x4", "1x8192", "1024x8", "2048x16")
HEADS = ((2, 8), (8, 32), (16, 64))
OLD = "e" * 64


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch, fake_template())


def timed(problem_, workload, time_us, schedule=None, **changes):
    return trial(schedule or point(), problem_=problem_, workload=workload, samples_us=(time_us,), **changes)


def rows(a=2.0, b=0.05, c=6.0, noise=0.0, schedule=None, heads=HEADS, workloads=WORKLOADS, **changes):
    """Trials whose times follow a·depth + b·CTAs + c."""
    draw, made = random.Random(0), []
    for h, hv in heads:
        for workload in workloads:
            p, lengths = problem(h, hv), lengths_of(workload)
            depth = features.steps(p, schedule or point(), lengths, 132)
            time_us = a * depth + b * features.num_ctas(p, schedule or point(), lengths) + c
            made.append(timed(p, workload, time_us * (1 + draw.gauss(0, noise)), schedule, **changes))
    return made


def fitted(trials):
    return fit_models(observations(trials))


def test_coefficients_of_exact_rows_come_back():
    (model,), refused = fitted(rows())
    assert model.coefficients[:3] == pytest.approx((2.0, 0.05, 6.0))
    assert (model.rows, model.loo_error, refused) == (12, pytest.approx(0, abs=1e-9), [])
    assert model.problem == family(problem())


def test_noise_and_one_broken_row_move_the_coefficients_little():
    trials = rows(noise=0.01)
    trials[3] = timed(trials[3].problem, trials[3].workload, trials[3].median_us * 3)
    (model,), _ = fitted(trials)
    assert model.coefficients[0] == pytest.approx(2.0, rel=0.05)
    assert model.coefficients[2] == pytest.approx(6.0, rel=0.3)
    assert model.loo_error < 0.03


def test_no_coefficient_is_negative():
    matrix = [(1.0, 10.0, 1.0), (2.0, 10.0, 1.0), (3.0, 20.0, 1.0), (4.0, 10.0, 1.0), (5.0, 30.0, 1.0)]
    x = robust.fit(matrix, [10 * a - 0.1 * b for a, b, _ in matrix])
    assert min(x) >= 0
    assert x[0] > 9


def test_solver_agrees_with_scipy_where_that_is_installed():
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    draw = random.Random(1)
    for _ in range(20):
        truth = [draw.choice((0.0, draw.uniform(0.1, 5))) for _ in range(3)]
        matrix = [(draw.uniform(1, 100), draw.uniform(1, 100), 1.0) for _ in range(15)]
        times = [max(0.5, sum(x * f for x, f in zip(truth, row)) * draw.gauss(1, 0.05) + 1) for row in matrix]

        def errors(x, matrix=matrix, times=times):
            return [(sum(c * f for c, f in zip(x, row)) / t - 1) / robust.SCALE for row, t in zip(matrix, times)]

        theirs = optimize.least_squares(errors, [1.0] * 3, bounds=(0, float("inf")), loss="soft_l1", xtol=1e-12)
        ours = robust.fit(matrix, times)
        cost = sum((1 + e * e) ** 0.5 - 1 for e in errors(ours))
        assert cost <= theirs.cost * (1 + 1e-4)


def test_what_explains_nothing_gets_no_weight():
    (model,), _ = fitted(rows(b=0.0, c=0.0))
    assert model.coefficients[:3] == pytest.approx((2.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        (rows(heads=HEADS[:1], workloads=WORKLOADS), f"rows >= {MIN_ROWS}.*there are 4"),
        (rows(workloads=WORKLOADS[1:2], heads=((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))), "depths >= 3.*there are 1"),
        ([timed(t.problem, t.workload, 10.0 ** (i % 4)) for i, t in enumerate(rows())], "leave-one-out error <= 10%"),
    ],
)
def test_bad_fit_is_refused_with_its_reason(trials, reason):
    models, (refusal,) = fitted(trials)
    assert models == []
    assert re.search(reason, refusal.reason)


def test_failed_trials_are_no_rows_and_the_race_counts_more_than_the_search():
    trials = rows()
    slow = [timed(t.problem, t.workload, 2 * t.median_us) for t in trials]
    raced = [timed(t.problem, t.workload, t.median_us, phase="final") for t in trials]
    (model,), _ = fitted([*raced, *slow, trial(point(), "wrong")])
    assert model.coefficients[:3] == pytest.approx((2.0, 0.05, 6.0))
    assert model.rows == 12


def test_rows_of_another_source_or_card_are_not_mixed_in():
    old = [timed(t.problem, t.workload, 5 * t.median_us, template_digest=OLD) for t in rows()]
    (model,), _ = fitted([*old, *old, *rows()])
    assert model.coefficients[:3] == pytest.approx((2.0, 0.05, 6.0))
    assert model.template_digest == trial().template_digest
    (model,), _ = fitted(old)
    assert (model.template_digest, model.coefficients[0]) == (OLD, pytest.approx(10.0))


def test_digest_says_what_was_fitted():
    trials = rows()
    (one,), _ = fitted(trials)
    (same,), _ = fitted(trials[::-1])
    (other,), _ = fitted([*trials[:-1], timed(trials[-1].problem, trials[-1].workload, trials[-1].median_us + 0.5)])
    (older,), _ = fitted([timed(t.problem, t.workload, t.median_us, template_digest=OLD) for t in trials])
    assert one.fitted_on == same.fitted_on
    assert len({one.fitted_on, other.fitted_on, older.fitted_on}) == 3


def wave(a, b):
    problem_ = problem(2, 8, kernel="segment_forward")
    return cost_model(problem_=problem_, coefficients=(a, b, 4.0), form="one_wave")


def test_best_segment_is_where_a_one_wave_model_is_least():
    assert best_segment(wave(0.8, 1.5), 128) == pytest.approx((1.5 * 128 / 0.8) ** 0.5)
    assert best_segment(wave(0.0, 1.5), 128) == 128  # never longer than the sequence
    assert best_segment(wave(0.8, 0.0), 128) == 1  # nor shorter than a chunk


def test_residuals_are_of_the_rows_that_were_fitted():
    trials = [*rows(noise=0.01), *rows(a=9.0, template_digest=OLD)]
    found = observations(trials)
    (model,), _ = fit_models(found)
    described = residuals(model, found)
    assert len(described) == model.rows
    assert all(predicted == pytest.approx(measured, rel=0.05) for measured, predicted in described)


def test_depth_of_independent_chunks_is_their_share_of_an_sm():
    p, schedule = problem(16, 64, kernel="kkt_inverse"), Schedule.of("fake", {"value_heads_per_cta": 2})
    assert features.num_ctas(p, schedule, [8192, 0, 1]) == 129 * 64 // 2
    assert features.steps(p, schedule, [8192, 0, 1], 132) == 2 * 32  # ⌈4128 / 132⌉ CTAs of two heads
    assert features.steps(p, schedule, [], 132) == 0


def test_fits_are_stored_replaced_and_removed_when_refused(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        db.store.add(trials=rows())
        stored = fit_database(db).models
        assert db.fits(problem(4, 16)) == stored
        assert db.fits(problem(4, 16, head_dim_v=64)) == []
        db.store.add(trials=[timed(t.problem, t.workload, 10.0 ** (i % 4)) for i, t in enumerate(rows())])
        again = fit_database(db)
        assert (again.models, len(again.refused)) == ([], 1)
        assert db.fits(problem(4, 16)) == []


def test_empty_database_says_what_to_do(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db, pytest.raises(DatabaseError, match="qla-tune import"):
        fit_database(db)
    assert not (tmp_path / "t.sqlite").exists()


def test_verb_prints_json_and_its_exit_code_says_whether_anything_was_stored(tmp_path, capsys):
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.add(trials=[*rows(), trial(point(1, 1, "q"))])
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--db", str(path), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert said["models"][0]["coefficients"]["us_per_step"] == pytest.approx(2.0)
    assert said["models"][0]["environment"] == ENVIRONMENT.as_dict()
    assert "rows >= 5" in said["refused"][0]["reason"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--db", str(path), "--arch", "sm120"])
    assert ended.value.code == 2
    other = tmp_path / "few.sqlite"
    with Store(other) as store:
        store.add_trial(trial())
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--db", str(other)])
    assert ended.value.code == 1
    assert "refused" in capsys.readouterr().out
