"""When and how a batch is split, from made-up cost models: against every other length, and against the rules."""

import dataclasses
import math
import random
import re
import statistics
import time

import pytest

from qla_jit import split
from qla_jit.config import FORWARD_KERNELS, SPLIT_KERNELS, OpConfig
from qla_jit.db import BestRow, CostModel, Database, Environment
from qla_jit.db.lookup import family
from qla_jit.errors import InputError
from qla_jit.model.features import MEASURED_WARMUP_CHUNKS, Split, num_ctas, segments_of, steps
from qla_jit.plan import Option
from qla_jit.planned import describe
from qla_jit.registry import digest, select
from qla_jit.segments import least_segment_chunks
from qla_jit.split_models import SplitModels, split_options
from qla_jit.split_plan import EXACT, FEW_SEQUENCES, MARGIN, _Search, plan_split

SMS = 132
TOLERANCE = 1e-5
CARD = Environment("card", "sm90", SMS, "1", "13.0", "0.1", "2.0")
TIMES = {
    "kkt_inverse": (1.2, 0.02, 4.0),
    "fused_forward": (1.8, 0.05, 8.0),
    "segment_state": (1.35, 0.05, 8.0),
    "segment_correct": (0.7, 0.02, 5.0),
    "segment_forward": (1.85, 0.05, 9.0),
}
NARROW = {
    "fused_forward": (dict(dv_split=2, registers="40/168/240"), (1.4, 0.05, 8.0)),
    "segment_state": (dict(columns=64, registers="40/168/240"), (1.1, 0.05, 8.0)),
    "segment_forward": (dict(dv_split=2, registers="40/168/240"), (1.45, 0.05, 9.0)),
}


def default(problem):
    return select(problem).default(problem)


def models(num_heads=2, num_value_heads=8, times=TIMES, **changes):
    config = OpConfig(num_heads, num_value_heads)
    problems = {kernel: config.problem(kernel) for kernel in (*FORWARD_KERNELS, *SPLIT_KERNELS)}
    schedules = {kernel: default(problem) for kernel, problem in problems.items()}
    options = {kernel: (Option(schedules[kernel], *times[kernel]),) for kernel in problems}
    for kernel, (values, coefficients) in NARROW.items():
        options[kernel] += (Option(schedules[kernel].replace(**values), *coefficients),)
    return SplitModels(problems, schedules, {**options, **changes})


def total_us(found, lengths, segment_chunks, share=0.75, warmup=MEASURED_WARMUP_CHUNKS):
    """The prediction by the features themselves; of the launches only the first one's constant counts."""

    def fastest(kernel, split=None, may=lambda ctas: True):
        ctas = [num_ctas(found.problems[kernel], o.schedule, lengths, split) for o in found.options[kernel]]
        return min(
            (
                o.us_per_step * steps(found.problems[kernel], o.schedule, lengths, SMS, split)
                + o.us_per_cta * number
                + (o.us_constant if kernel == "kkt_inverse" else 0.0)
                for o, number in zip(found.options[kernel], ctas)
                if may(number)
            ),
            default=math.inf,
        )

    inverse = fastest("kkt_inverse")
    if segment_chunks is None:
        if len({-(-length // 64) for length in lengths}) == 1:
            return inverse + fastest("fused_forward")
        uncut = Split(1 << 20, share, warmup)
        ways = fastest("fused_forward", None, lambda n: n <= SMS), fastest("segment_forward", uncut, lambda n: n > SMS)
        return inverse + min(ways)
    return inverse + sum(fastest(kernel, Split(segment_chunks, share, warmup)) for kernel in SPLIT_KERNELS)


def test_one_long_sequence_on_few_heads_is_split():
    plan = plan_split(models(), [32768], SMS, TOLERANCE)
    assert plan.segment_chunks == 32 and plan.reason == ""
    assert list(plan.schedules) == ["kkt_inverse", *SPLIT_KERNELS]
    assert plan.chosen.total_us == pytest.approx(sum(plan.predicted_us.values()))
    assert any(other.segment_chunks is None for other in plan.alternatives)


@pytest.mark.parametrize(
    ("heads", "lengths", "reason"),
    [
        ((16, 64), [8192] * 1000, "already keep the card as busy"),
        ((16, 64), [32768], "more than 5% faster"),
        ((2, 8), [900, 0, 5], "no sequence has two segments of 8 chunks"),
        ((2, 8), [], "no sequence has two segments of 8 chunks"),
        ((2, 8), [0, 0], "no sequence has two segments of 8 chunks"),
    ],
)
def test_whole_sequences_say_why(heads, lengths, reason):
    plan = plan_split(models(*heads), lengths, SMS, TOLERANCE)
    assert plan.segment_chunks is None and reason in plan.reason
    assert list(plan.schedules) == list(FORWARD_KERNELS)


@pytest.mark.parametrize("missing", ["fused_forward", *SPLIT_KERNELS])
def test_without_a_model_of_a_kernel_nothing_is_split(missing):
    plan = plan_split(models(**{missing: ()}), [32768], SMS, TOLERANCE)
    assert plan.segment_chunks is None and "no cost models" in plan.reason
    assert list(plan.schedules) == list(FORWARD_KERNELS)


def test_without_a_model_of_kkt_inverse_the_others_decide():
    plan = plan_split(models(kkt_inverse=()), [32768], SMS, TOLERANCE)
    assert plan.segment_chunks and plan.predicted_us["kkt_inverse"] is None


def test_exact_means_no_windows_whatever_the_gates():
    exact = plan_split(models(), [32768], SMS, EXACT, window_share=1.0)
    assert (exact.window_share, exact.warmup_chunks) == (0.0, 0)
    assert exact.chosen == plan_split(models(), [32768], SMS, TOLERANCE, window_share=0.0).chosen
    assert exact.chosen.total_us > plan_split(models(), [32768], SMS, TOLERANCE, window_share=1.0).chosen.total_us


def test_expected_windows_follow_from_the_tolerance():
    assert plan_split(models(), [32768], SMS, TOLERANCE).warmup_chunks == MEASURED_WARMUP_CHUNKS
    assert plan_split(models(), [32768], SMS, 1e-4).warmup_chunks == 3
    assert plan_split(models(), [32768], SMS, 1e-4).window_share == 0.75


def test_a_split_must_be_faster_by_the_margin():
    found = models()
    plan = plan_split(found, [32768], SMS, TOLERANCE, 0.75)
    forward = found.schedules["fused_forward"]
    for factor, is_split in ((1.01, True), (0.99, False)):
        whole_us = factor * plan.chosen.total_us / (1 - MARGIN)
        us_per_chunk = (whole_us - plan.predicted_us["kkt_inverse"]) / 512  # one wave of 512 chunks
        other = plan_split(models(fused_forward=(Option(forward, us_per_chunk),)), [32768], SMS, TOLERANCE, 0.75)
        assert other.segment_chunks == (plan.segment_chunks if is_split else None)
        assert is_split or "more than 5% faster" in other.reason


def test_constants_count_of_the_first_kernel_alone():
    found, late = models(), models(times={kernel: (a, b, c + 100.0) for kernel, (a, b, c) in TIMES.items()})
    plans = [plan_split(of, [32768], SMS, TOLERANCE) for of in (found, late)]
    assert plans[0].segment_chunks == plans[1].segment_chunks == 32
    added = {kernel: plans[1].predicted_us[kernel] - plans[0].predicted_us[kernel] for kernel in plans[0].schedules}
    assert added == pytest.approx({"kkt_inverse": 100.0, **dict.fromkeys(SPLIT_KERNELS, 0.0)})
    assert plans[1].chosen.total_us - plans[0].chosen.total_us == pytest.approx(100.0)
    whole_us = [plan_split(of, [900], SMS, TOLERANCE).chosen.total_us for of in (found, late)]
    assert whole_us[1] - whole_us[0] == pytest.approx(100.0)


def batches(count):
    draw = random.Random(7)
    for _ in range(count):
        heads = draw.choice([2, 4, 8, 16, 32, 64])
        lengths = [int(2 ** draw.uniform(6, 16)) for _ in range(draw.choice([1, 1, 2, 3, 8, 20, 64]))]
        yield models(max(1, heads // 4), heads), lengths, draw.choice([0.0, 0.5, 0.75, 1.0])


def test_predictions_are_those_of_the_features():
    for found, lengths, share in batches(60):
        plan = plan_split(found, lengths, SMS, TOLERANCE, share)
        for way in (plan.chosen, *plan.alternatives):
            assert way.total_us == pytest.approx(total_us(found, lengths, way.segment_chunks, share), rel=2e-3)


def test_sequences_that_would_wait_in_the_order_of_the_batch_start_by_length():
    ragged, equal, few = [500] * 40 + [900], [900] * 41, [500, 900]  # too short to be cut
    without = models(segment_forward=())
    for lengths, is_ordered in ((ragged, True), (equal, False), (few, False)):
        plan = plan_split(models(), lengths, SMS, "exact")
        assert plan.chosen.is_ordered == is_ordered and plan.segment_chunks is None
    plan = plan_split(models(), ragged, SMS, "exact")
    assert list(plan.schedules) == ["kkt_inverse", "segment_forward"]
    assert describe(plan).startswith("whole sequences, long ones first, predicted")
    assert not plan_split(without, ragged, SMS, "exact").chosen.is_ordered


def test_the_length_is_near_the_best_of_all():
    losses = []
    for found, lengths, share in batches(60):
        plan = plan_split(found, lengths, SMS, TOLERANCE, share)
        longest = max(lengths) // 64
        ways = [None, *sorted({max(8, round(8 * 1.06**i)) for i in range(90) if 8 * 1.06**i < longest})]
        best_us = min(total_us(found, lengths, way, share) for way in ways)
        losses.append(plan.chosen.total_us / best_us - 1)
    assert statistics.fmean(losses) < 0.02
    assert max(losses) < 0.12


@pytest.mark.parametrize("lengths", [(8192,) * 4, (32768,), (4096, 28672)], ids=str)
def test_no_cut_is_an_alternative_to_itself(lengths):
    found = models()
    plan = plan_split(found, lengths, SMS, TOLERANCE, window_share=0.75)
    tried = [way.segment_chunks for way in (plan.chosen, *plan.alternatives) if way.segment_chunks is not None]
    least = least_segment_chunks(found.problems["segment_forward"])
    cuts = {tuple(segments_of(length // 64, chunks, least) for length in lengths) for chunks in tried}
    assert len(tried) >= 3 and len(cuts) == len(tried)


def test_what_a_split_launches_at_least_counts_before_any_is_tried():
    """Each of a thousand sequences has CTAs of its own whatever is cut: where these cost, no split can gain."""
    lengths = [1 + 7919 * i % 2000 for i in range(1000)]
    dear = Option(default(OpConfig(2, 8).problem("segment_forward")), 1.85, 0.5, 9.0)
    plan = plan_split(models(segment_forward=(dear,)), lengths, SMS, TOLERANCE, window_share=0.75)
    assert plan.segment_chunks is None and not plan.alternatives
    assert plan.reason == "whole sequences already keep the card as busy as a split could"


def test_equal_calls_give_equal_plans():
    for found, lengths, share in batches(10):
        assert plan_split(found, lengths, SMS, TOLERANCE, share) == plan_split(found, lengths, SMS, TOLERANCE, share)


@pytest.mark.wall_clock
@pytest.mark.parametrize(
    "lengths",
    [[8192] * 1000, [1 + 17 * n % 65536 for n in range(1000)], [1 + 17 * n % 2048 for n in range(999)] + [262144]],
    ids=["equal", "ragged", "one long"],
)
def test_a_plan_of_a_thousand_sequences_takes_less_than_a_millisecond(lengths):
    found, times = models(), []
    for _ in range(30):
        started = time.perf_counter()
        plan_split(found, lengths, SMS, TOLERANCE)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


@pytest.mark.parametrize(("window", "share"), [(EXACT, 1.5), (EXACT, -0.1), (0.0, None), (1.0, None)])
def test_impossible_shares_and_windows_are_refused(window, share):
    with pytest.raises(InputError, match="0 <= window_share <= 1"):
        plan_split(models(), [32768], SMS, window, share)


def test_exact_is_the_word_of_the_split():
    assert EXACT == split.EXACT


def cost_model(problem, schedule, coefficients, form="work", **changes):
    values = dict(rows=24, loo_error=0.02, loo_p90=0.05, fitted_on="f", template_digest=digest(schedule.template))
    kept = family(problem) if form == "work" else problem
    return CostModel(kept, schedule, form, coefficients, environment=CARD, **{**values, **changes})


def best(problem, workload, schedule, median_us=100.0):
    return BestRow(problem, workload, schedule, median_us, median_us, digest(schedule.template), CARD, 10)


def test_schedules_are_winners_that_have_a_model_one_for_each_way_to_share_the_work():
    problem = OpConfig(2, 8).problem("segment_state")
    whole = default(problem)
    other, narrow = whole.replace(stages_x=1), whole.replace(columns=64, registers="40/168/240")
    unfitted = narrow.replace(stages_k=2)
    rows = [best(problem, "*", other), best(problem, "1x32768/16", narrow), best(problem, "1x32768/8", unfitted)]
    fits = [cost_model(problem, schedule, (i + 1.0, 0.0, 1.0)) for i, schedule in enumerate((whole, other, narrow))]
    found = [option for option, _ in split_options(problem, rows, fits)]
    assert [option.schedule for option in found] == [other, narrow]
    assert [option.us_per_step for option in found] == [2.0, 3.0]
    fits[1] = dataclasses.replace(fits[1], rows=30)  # without rows of these heads, what is known best of any
    assert [option.schedule for option, _ in split_options(problem, [], fits)] == [other, narrow]
    stale = [cost_model(problem, whole, (1.0, 0.0, 1.0), template_digest="e" * 64)]
    assert split_options(problem, [], stale) == []


def stored(path, *more):
    config = OpConfig(2, 8)
    problems = {kernel: config.problem(kernel) for kernel in (*FORWARD_KERNELS, *SPLIT_KERNELS)}
    db = Database(path, shipped=False)
    rows = [best(p, "1x32768" + "/16" * (k in SPLIT_KERNELS), default(p)) for k, p in problems.items()]
    fits = [cost_model(p, default(p), TIMES[k]) for k, p in problems.items()]
    db.store.add(best=rows, fits=[*fits, *more])
    return config, db


def test_models_come_from_the_database(tmp_path):
    config, db = stored(tmp_path / "t.sqlite")
    with db:
        found = SplitModels.of(config, db)
    assert found.can_split and found.one_wave is None
    assert {k: o.us_per_step for k, (o,) in found.options.items()} == {k: t[0] for k, t in TIMES.items()}
    assert plan_split(found, [32768], SMS, TOLERANCE).segment_chunks is not None


def test_an_empty_database_never_splits(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        assert plan_split(SplitModels.of(OpConfig(2, 8), db), [32768], SMS).segment_chunks is None


def test_one_wave_form_is_used_where_it_errs_less_and_describes_the_call(tmp_path):
    forward = OpConfig(2, 8).problem("segment_forward")
    wave = cost_model(forward, default(forward), (3.0, 1.5, 20.0), "one_wave", loo_error=0.01)
    config, db = stored(tmp_path / "t.sqlite", wave)
    with db:
        found = SplitModels.of(config, db)
    assert found.one_wave == wave
    plan = plan_split(found, [32768], SMS, TOLERANCE)
    told = {way.segment_chunks: way for way in (plan.chosen, *plan.alternatives)}
    inverse_us = plan.predicted_us["kkt_inverse"]
    constants_us = sum(TIMES[kernel][2] for kernel in SPLIT_KERNELS)  # the form has them, as its rows do
    assert told[32].total_us == pytest.approx(inverse_us + 3.0 * 32 + 1.5 * 16 + 20.0 - constants_us)
    ragged = plan_split(found, [32768, 16384], SMS, TOLERANCE)
    assert ragged.chosen.total_us == pytest.approx(sum(ragged.predicted_us.values()))
    worse = cost_model(forward, default(forward), (3.0, 1.5, 20.0), "one_wave", loo_error=0.03)
    config, db = stored(tmp_path / "other.sqlite", worse)
    with db:
        assert SplitModels.of(config, db).one_wave is None


def test_one_wave_form_is_less_the_constants_of_the_schedules_that_run():
    forward = OpConfig(2, 8).problem("segment_forward")
    whole, halves = models().options["segment_forward"]
    found = models(segment_forward=(halves, dataclasses.replace(whole, us_constant=3.0)))
    wave = cost_model(forward, default(forward), (3.0, 1.5, 20.0), "one_wave")
    plan = plan_split(dataclasses.replace(found, one_wave=wave), [32768], SMS, TOLERANCE)
    (way,) = (of for of in (plan.chosen, *plan.alternatives) if of.segment_chunks == 32)
    assert way.kernels[-1].schedule == whole.schedule  # 128 CTAs run at once, 256 do not
    constants_us = TIMES["segment_state"][2] + TIMES["segment_correct"][2] + 3.0
    inverse_us = plan.predicted_us["kkt_inverse"]
    assert way.total_us == pytest.approx(inverse_us + 3.0 * 32 + 1.5 * 16 + 20.0 - constants_us)


def test_text_names_the_choice_the_times_and_what_was_beaten():
    text = describe(plan_split(models(), [32768], SMS, TOLERANCE))
    assert text.startswith("segments of at most 32 chunks, predicted ")
    assert re.search(r"segment_state +\d+\.\d µs  segment_state_sm90\(columns=", text)
    assert "expected windows: 75% of the value heads, 4 chunks" in text
    assert re.search(r"alternatives on 132 SMs:\n(.*\n)*  whole sequences: \d+\.\d µs \(kkt_inverse", text)
    whole = describe(plan_split(models(segment_state=(), kkt_inverse=()), [32768], SMS))
    assert whole.startswith("whole sequences, predicted ") and "no cost models" in whole
    assert re.search(r"kkt_inverse +unknown", whole)
    assert "no windows: every value head is exact" in describe(plan_split(models(), [32768], SMS))


def predicted_us(found, lengths, segment_chunks, share):
    search = _Search(found, lengths, SMS, share, MEASURED_WARMUP_CHUNKS)
    search.plan()
    return search._time_us(segment_chunks)


def test_without_a_share_the_plan_is_taken_that_loses_less_where_it_is_wrong():
    draw, found, cautious = random.Random(5), models(), 0
    for _ in range(60):
        lengths = [draw.randrange(64, 40000) for _ in range(draw.choice((1, 2, 5, 20)))]
        plan, expected = (plan_split(found, lengths, SMS, TOLERANCE, share) for share in (None, 0.75))
        assert not expected.caution
        if not plan.caution:
            assert plan == expected
            continue
        cautious += 1
        us = {
            (of, share): predicted_us(found, lengths, p.segment_chunks, share)
            for of, p in (("expected", expected), ("plan", plan))
            for share in (0.75, 0.0)
        }
        loses = us["expected", 0.0] / us["plan", 0.0] - 1
        assert loses > us["plan", 0.75] / us["expected", 0.75] - 1
        assert loses > MARGIN or plan.segment_chunks is None
        exact = plan_split(found, lengths, SMS, TOLERANCE, 0.0)
        assert us["plan", 0.0] < exact.chosen.total_us * (1 + MARGIN)
        assert plan.caution in describe(plan) and plan.window_share == 0.75 and expected.chosen in plan.alternatives
        assert (plan.reason == "") == (plan.segment_chunks is not None)
        assert plan.chosen.segment_chunks not in [other.segment_chunks for other in plan.alternatives]
    assert 5 <= cautious < 60


def test_what_is_known_or_cannot_matter_is_planned_without_caution():
    for given in ((0.75,), (0.0,), (1.0,)):
        assert not plan_split(models(), [32768], SMS, TOLERANCE, *given).caution
    assert not plan_split(models(), [32768], SMS, EXACT).caution
    whole = [[8192] * 64, [500]]
    assert all(plan_split(models(), lengths, SMS, TOLERANCE).segment_chunks is None for lengths in whole)
    assert not any(plan_split(models(), lengths, SMS, TOLERANCE).caution for lengths in whole)


def test_many_sequences_are_planned_once():
    lengths = [20000, *[100] * FEW_SEQUENCES]
    assert plan_split(models(), lengths, SMS, TOLERANCE) == plan_split(models(), lengths, SMS, TOLERANCE, 0.75)
