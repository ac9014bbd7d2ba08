"""Cost models of the kernels of a split from rows of known coefficients, and the plan that follows."""

import pytest
from split_times import COEFFICIENTS, timed
from tuning_fakes import ENVIRONMENT

from qla_jit.config import FORWARD_KERNELS, SPLIT_KERNELS, OpConfig
from qla_jit.db import Database, jsonl
from qla_jit.db.lookup import family
from qla_jit.model.fit import fit_models, residuals
from qla_jit.model.observation import observations
from qla_jit.model.split_rows import split_times
from qla_jit.registry import select
from qla_jit.split_models import SplitModels
from qla_jit.split_plan import plan_split
from qla_jit.tune.finals import best_row
from qla_jit.tune.fit_commands import fit_database
from qla_jit.tune.shipped_plan import SHIPPED_SPLIT_WORKLOADS, SHIPPED_WORKLOADS
from qla_jit.workload import suited

HEADS = ((2, 8), (4, 16), (8, 32))
CONFIG = OpConfig(2, 8)


def default(problem):
    return select(problem).default(problem)


def rows(kernels=(*FORWARD_KERNELS, *SPLIT_KERNELS), heads=HEADS, **changes):
    problems = [OpConfig(*h).problem(kernel) for h in heads for kernel in kernels]
    workloads = (*SHIPPED_WORKLOADS, *SHIPPED_SPLIT_WORKLOADS)
    return [timed(p, default(p), w, **changes) for p in problems for w in suited(p.kernel, workloads)]


def fitted(trials):
    return fit_models(observations(trials))


@pytest.mark.parametrize("kernel", SPLIT_KERNELS)
def test_coefficients_of_each_kernel_come_back(kernel):
    (model,), _ = fitted(rows((kernel,)))
    assert model.coefficients[:3] == pytest.approx(COEFFICIENTS[kernel], rel=1e-6)
    assert (model.form, model.problem) == ("work", family(CONFIG.problem(kernel)))
    assert model.loo_error == pytest.approx(0, abs=1e-9) and model.rows == len(HEADS) * len(SHIPPED_SPLIT_WORKLOADS)


def test_whole_splits_are_rows_of_one_wave_equal_sequences_and_default_gates():
    times = split_times(observations(rows()))
    forward = CONFIG.problem("segment_forward")
    found = {t.forward.workload: t for t in times[forward, default(forward)]}
    # Of 8 heads: up to 16 segments at once, of which 32 of 8 heads would be 256 CTAs.
    assert set(found) == {
        "1x8192/8", "1x8192/16", "1x8192/32", "1x8192/64", "1x32768/32", "1x32768/64", "1x32768/128", "1x32768/256",
        "8192x4/32",
    }  # fmt: skip
    split = found["1x32768/32"]
    assert (split.segment_chunks, split.chunks, len(split.parts)) == (32, 512, 3)
    assert split.time_us == pytest.approx(sum(part.time_us for part in split.parts))


def test_one_wave_form_of_the_whole_split_is_fitted():
    models, _ = fitted(rows())
    waves = {m.problem.num_value_heads: m for m in models if m.form == "one_wave"}
    assert set(waves) == {8, 16}  # of 32 heads too few cuts run at once
    wave = waves[8]
    assert wave.problem == CONFIG.problem("segment_forward") and wave.schedule == default(wave.problem)
    per_chunk = COEFFICIENTS["segment_state"][0] + COEFFICIENTS["segment_forward"][0]
    assert wave.values["us_per_chunk"] == pytest.approx(per_chunk, rel=0.05)
    assert wave.loo_error < 0.05
    described = residuals(wave, observations(rows()))
    assert len(described) == wave.rows
    assert all(predicted == pytest.approx(measured, rel=0.15) for measured, predicted in described)


def test_too_few_cuts_are_refused_with_the_reason():
    _, refused = fitted(rows(heads=((8, 32),)))
    (wave,) = [r for r in refused if r.form == "one_wave"]
    assert "rows >= 5" in wave.reason and wave.problem.num_value_heads == 32


def test_without_a_row_of_every_kernel_there_is_no_whole_split():
    assert split_times(observations(rows(("segment_state", "segment_forward")))) == {}


def test_kernels_of_an_older_source_do_not_replace_those_of_today():
    old = [t for t in rows(heads=((2, 8),), template_digest="e" * 64, samples_us=(1.0,))]
    forward = CONFIG.problem("segment_forward")
    times = split_times(observations([*old, *rows(heads=((2, 8),))]))[forward, default(forward)]
    assert min(t.time_us for t in times) > 3.0


def test_fitted_database_decides_when_to_split(tmp_path):
    trials = rows()
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        raced = [timed(t.problem, t.schedule, t.workload, phase="final") for t in trials]
        best = [best_row([t], t.schedule, 1) for t in raced]
        db.store.add(trials=trials, best=best)
        result = fit_database(db)
        assert {(m.problem.kernel, m.form) for m in result.models} >= {(kernel, "work") for kernel in COEFFICIENTS}
        found = SplitModels.of(CONFIG, db)
        assert found.can_split
        plan = plan_split(found, [32768], ENVIRONMENT.sm_count, 1e-5)
        assert plan.segment_chunks == 32
        many = SplitModels.of(OpConfig(16, 64), db)  # by the rows of its nearest neighbour
        assert plan_split(many, [8192] * 8, ENVIRONMENT.sm_count, 1e-5).segment_chunks is None
        text = jsonl.dumps(fits=result.models)
        assert set(jsonl.loads(text, "text").fits) == set(result.models)
