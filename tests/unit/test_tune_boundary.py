"""Where splitting pays: the plane of an operator from rows of known coefficients, and its section of the report."""

import re

import pytest
from split_times import timed
from test_split_fit import CONFIG, default, rows
from test_tune_report import checked

from qla_jit.config import SPLIT_KERNELS
from qla_jit.db import Database
from qla_jit.tune.boundary import FLASHINFER, FLASHQLA, FLASHQLA_SM100, LENGTHS, rules
from qla_jit.tune.finals import best_row
from qla_jit.tune.fit_commands import fit_database
from qla_jit.tune.report import render
from qla_jit.tune.report_boundary import boundary_section
from qla_jit.tune.report_data import filtered, from_database, from_files

FORWARD = CONFIG.problem("segment_forward")


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("boundary") / "t.sqlite"
    trials = rows()
    fused = CONFIG.problem("fused_forward")
    trials += [timed(fused, default(fused), "1x32768")]
    with Database(path, shipped=False) as db:
        db.store.add(trials=trials, best=[best_row([t], t.schedule, 1) for t in trials])
        fit_database(db)
        yield db


@pytest.fixture(scope="module")
def data(database):
    return from_database(database)


def test_few_heads_are_split_from_a_length_on_and_many_are_not(data):
    planes = {plane.forward.num_value_heads: plane for plane in data.planes}
    assert set(planes) == {8, 16, 32}
    columns = planes[8].columns
    assert [c.pairs for c in columns] == [8 * c.sequences for c in columns]
    first = columns[0].split_lengths
    assert first and first == [length for length in LENGTHS if length >= first[0]]
    by_pairs = {c.pairs: c.split_lengths for c in columns}
    assert by_pairs[128] == []  # one full wave of 132 SMs
    assert by_pairs[136] != []  # and a second one that is nearly empty
    assert len(planes[32].columns[0].split_lengths) <= len(first)


def test_points_measured_both_ways_name_the_faster(data):
    plane = next(plane for plane in data.planes if plane.forward == FORWARD)
    points = {(m.sequences, m.tokens): m for m in plane.measured}
    assert set(points) == {(1, 8192), (1, 32768), (4, 8192)}
    long = points[1, 32768]
    assert long.pays and long.segment_chunks == 32 and long.plan.segment_chunks is not None
    forms = [timed(CONFIG.problem(k), default(CONFIG.problem(k)), "1x32768/32").median_us for k in SPLIT_KERNELS]
    assert long.split_us == pytest.approx(sum(forms))


def test_section_has_chart_tables_and_rules(data):
    page = checked(f"<main>{boundary_section(data.planes)}</main>")
    assert page.seen.count("figure") == 3
    assert "FlashInfer" in page.text and "FlashQLA, fixed rule" in page.text and "Measured both ways" in page.text
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == 3
    assert re.fullmatch(
        r"heads 2:8: splitting is predicted to pay up to \d+ sequences × heads; measured both ways 3, split faster \d",
        labels[0],
    )


def test_section_is_on_the_page_only_with_models_of_every_kernel(data, tmp_path):
    assert 'id="boundary"' in render(data)
    with Database(tmp_path / "some.sqlite", shipped=False) as db:
        trials = rows(("fused_forward", "segment_state", "segment_forward"))
        db.store.add(trials=trials, best=[best_row([t], t.schedule, 1) for t in trials])
        fit_database(db)
        assert from_database(db).planes == []
        assert 'id="boundary"' not in render(from_database(db))
    assert boundary_section([]) == ""


def test_files_show_the_same_planes_as_the_database(database, data):
    assert from_files([database.path]).planes == [plane for plane in data.planes]
    assert [p.forward for p in filtered(data, heads=["2:8"]).planes] == [FORWARD]
    assert filtered(data, kernels=["fused_forward"]).planes == []


@pytest.mark.parametrize(
    ("rule", "splits", "whole"),
    [
        (FLASHINFER, [(65, 1), (8, 4000)], [(66, 4000)]),
        (FLASHQLA, [(40, 4), (56, 128)], [(41, 127), (57, 4000)]),
        (FLASHQLA_SM100, [(32, 192), (56, 256)], [(32, 191), (33, 255), (57, 4000)]),
    ],
    ids=["FlashInfer", "FlashQLA", "FlashQLA sm100"],
)
def test_rules_are_those_of_their_libraries(rule, splits, whole):
    assert all(rule.splits(*point) for point in splits) and not any(rule.splits(*point) for point in whole)
    assert all(y0 <= y1 for (_, y0), (_, y1) in zip(rule.corners, rule.corners[1:]))


def test_rules_depend_on_the_architecture():
    assert [rule.name for rule in rules("sm90")] == ["FlashInfer", "FlashQLA, fixed rule"]
    assert rules("sm100") == (FLASHQLA_SM100,) and rules("sm120") == (FLASHQLA,)
