"""The choice between tuned schedules of the fused forward, from made-up rows: few sequences, many, ragged, none."""

import pytest

from qla_jit import plan
from qla_jit.config import OpConfig
from qla_jit.db import BestRow, CostModel, Environment
from qla_jit.db.lookup import family
from qla_jit.registry import digest, select

PROBLEM = OpConfig(16, 64).problem("fused_forward")
WHOLE = select(PROBLEM).default(PROBLEM)
HALVES = WHOLE.replace(dv_split=2, registers="40/168/240")
CARD = Environment("card", "sm90", 132, "1", "13.0", "0.1", "2.0")


def row(workload, schedule, median_us, default_us):
    return BestRow(PROBLEM, workload, schedule, median_us, default_us, digest(schedule.template), CARD, 10)


#: On few sequences two CTAs a head win; on a full card they lose.
ROWS = [row("8192x4", WHOLE, 512.0, 512.0), row("1x8192", HALVES, 200.0, 256.0), row("*", WHOLE, 300.0, 300.0)]


def test_steps_are_whole_waves_of_equal_sequences():
    assert plan.steps(PROBLEM, WHOLE, [8192], 132) == 128  # 64 CTAs, one wave
    assert plan.steps(PROBLEM, HALVES, [8192], 132) == 128  # 128 CTAs, one wave
    assert plan.steps(PROBLEM, WHOLE, [8192] * 4, 132) == 256  # 256 CTAs, two waves
    assert plan.steps(PROBLEM, HALVES, [8192] * 4, 132) == 512
    assert plan.steps(PROBLEM, WHOLE, [65, 0, 70], 132) == 2  # empty sequences take no step


def test_steps_of_ragged_sequences_are_the_longest_or_when_the_last_of_the_others_ends():
    assert plan.steps(PROBLEM, WHOLE, [6400, 64], 132) == 100
    assert plan.steps(PROBLEM, WHOLE, [640] * 20 + [64], 132) == 100  # 1280 CTAs: nine waves, then 92 and the short 64


def test_rates_come_from_winners_and_from_the_default_they_were_raced_against():
    rates = {o.schedule: o.us_per_step for o in plan.options(PROBLEM, ROWS)}
    assert rates == {WHOLE: pytest.approx(2.0), HALVES: pytest.approx(200 / 128)}


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([8192], HALVES), ([8192] * 2, WHOLE), ([8192] * 4, WHOLE), ([1024] * 8, WHOLE), ([1], HALVES), ([0, 5], HALVES)],
)
def test_choice_follows_the_predicted_time(lengths, wanted):
    assert plan.choose(PROBLEM, plan.options(PROBLEM, ROWS), lengths, 132, WHOLE) == wanted


def test_fewer_heads_take_the_rates_of_their_neighbour():
    few = OpConfig(2, 8).problem("fused_forward")
    assert plan.choose(few, plan.options(few, ROWS), [8192] * 4, 132, WHOLE) == HALVES
    assert plan.choose(few, plan.options(few, ROWS), [8192] * 40, 132, WHOLE) == WHOLE


def test_infeasible_schedules_are_no_option():
    narrow = OpConfig(16, 64, head_dim_v=64).problem("fused_forward")
    assert HALVES not in {o.schedule for o in plan.options(narrow, ROWS)}


def test_without_rows_or_tokens_the_fallback_stands():
    assert plan.choose(PROBLEM, (), [8192], 132, WHOLE) == WHOLE
    assert plan.choose(PROBLEM, plan.options(PROBLEM, ROWS), [0, 0], 132, WHOLE) == WHOLE


def fit(schedule, *coefficients, **changes):
    values = dict(rows=24, loo_error=0.02, loo_p90=0.05, fitted_on="f", template_digest=digest(schedule.template))
    return CostModel(family(PROBLEM), schedule, "work", coefficients, environment=CARD, **{**values, **changes})


FITS = [fit(WHOLE, 1.9, 0.1, 5.0), fit(HALVES, 1.4, 0.1, 30.0)]


def test_fits_replace_the_rates_and_bring_a_constant():
    found = {o.schedule: o for o in plan.options(PROBLEM, ROWS, FITS)}
    assert found[WHOLE].predict_us(PROBLEM, [8192] * 4, 132) == pytest.approx(1.9 * 256 + 0.1 * 256 + 5)
    assert plan.choose(PROBLEM, tuple(found.values()), [64], 132, WHOLE) == WHOLE  # one step: the constants decide
    assert plan.choose(PROBLEM, tuple(found.values()), [8192], 132, WHOLE) == HALVES


def test_a_kernel_behind_another_takes_its_time_without_the_constant():
    option = plan.Option(WHOLE, 1.5, 0.25, 40.0)
    assert (option.time_us(100, 8), option.chained_us(100, 8)) == (192.0, 152.0)


@pytest.mark.parametrize(
    "fits",
    [[], FITS[:1], [FITS[0], fit(HALVES, 1, 1, 1, template_digest="e" * 64)]],
    ids=["none", "one", "other source"],
)
def test_without_a_fit_of_every_candidate_the_rates_stand(fits):
    assert plan.options(PROBLEM, ROWS, fits) == plan.options(PROBLEM, ROWS)


def test_the_first_fit_of_a_schedule_counts():
    found = plan.options(PROBLEM, ROWS, [*FITS, fit(WHOLE, 9.0, 9.0, 9.0)])
    assert next(o for o in found if o.schedule == WHOLE).us_per_step == 1.9
