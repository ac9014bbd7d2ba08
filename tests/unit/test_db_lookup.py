import subprocess
import sys
import time
import warnings

import pytest
from tool_files import load_tool
from tuning_fakes import add_rows_of_a_gone_kernel, best, cost_model, fake_template, point, problem, use_templates

from qla_jit.config import OpConfig
from qla_jit.db import jsonl, layers, lookup, schema
from qla_jit.db.layers import Database
from qla_jit.db.lookup import TuningWarning, choose, command, distance, ranked


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    monkeypatch.setattr(lookup, "_warned", set())
    use_templates(monkeypatch, fake_template())


def user(*rows):
    return [("user", row) for row in rows]


def test_exact_row_is_found():
    match = choose(problem(), user(best()))
    assert (match.kind, match.layer, match.schedule, match.distance) == ("exact", "user", point(2, 4, "r"), 0.0)
    assert "1.25x the default" in str(match)


def test_nothing_tuned_gives_the_template_default():
    match = choose(problem(), [])
    assert (match.kind, match.layer, match.schedule) == ("default", None, point())


@pytest.mark.parametrize(
    ("heads", "expected"), [((16, 64), 0.0), ((8, 64), 0.5), ((8, 32), 1.0), ((16, 48), pytest.approx(0.623, abs=1e-3))]
)
def test_distance_is_that_of_value_heads_and_half_that_of_their_groups(heads, expected):
    assert distance(problem(*heads), problem(16, 64)) == expected


def test_groups_count_more_where_a_cta_has_all_of_a_group():
    def kkt(*heads):
        return OpConfig(*heads).problem("kkt_inverse")

    assert distance(kkt(8, 64), kkt(16, 64)) == 2.0 and distance(kkt(8, 32), kkt(16, 64)) == 1.0
    near = ranked(kkt(1, 4), user(*(best(problem_=kkt(*heads)) for heads in ((2, 4), (2, 8), (4, 4)))))
    assert [m.row.problem for m in near] == [kkt(2, 8), kkt(2, 4), kkt(4, 4)]


def test_nearest_row_by_heads_wins():
    rows = [best(problem_=problem(h, hv), schedule=point(a, 0)) for h, hv, a in ((2, 8, 2), (8, 32, 0), (16, 32, 2))]
    match = choose(problem(16, 48), user(*rows))
    assert (match.kind, match.row.problem.num_heads, match.row.problem.num_value_heads) == ("nearest", 8, 32)
    assert match.distance == pytest.approx(0.792, abs=1e-3)


def test_row_beyond_the_distance_limit_is_not_used():
    assert choose(problem(64, 64), user(best(problem_=problem(2, 8)))).kind == "nearest"
    assert choose(problem(64, 64), user(best(problem_=problem(1, 8)))).kind == "default"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"head_dim_k": 64},
        {"head_dim_v": 64},
        {"state_dtype": "bfloat16"},
        {"state_v_first": True},
        {"arch": "sm120"},
        {"chunk_size": 32},
    ],
)
def test_all_but_heads_must_match_exactly(other):
    assert choose(problem(), user(best(problem_=problem(**other)))).kind == "default"


def test_infeasible_row_is_passed_over_for_the_next():
    near = best(problem_=problem(8, 32), schedule=point(1, 0))  # a + b is odd
    far = best(problem_=problem(16, 32))
    match = choose(problem(), user(near, far))
    assert (match.row, match.passed_over) == (far, 1)
    assert "1 tuned row passed over that may not run for this problem" in str(match)


def test_default_says_whether_nothing_was_tuned_or_nothing_of_it_may_run():
    assert str(choose(problem(), [])) == "default of fake (nothing tuned within distance 4)"
    broken = [best(problem_=problem(16, 32), schedule=point(a, 0)) for a in (1, 3)]
    match = choose(problem(), user(*broken))
    assert (match.kind, match.passed_over) == ("default", 2)
    assert str(match) == "default of fake (2 tuned rows within distance 4, but none may run for this problem)"


def test_row_of_a_template_that_is_gone_is_a_miss():
    gone = best(schedule=point(template="gone"))
    assert choose(problem(), user(gone)).kind == "default"


def test_fresh_shipped_row_beats_a_stale_row_of_the_user():
    stale, fresh = best(template_digest="old"), best(schedule=point(2, 0))
    match = choose(problem(), [("user", stale), ("shipped", fresh)])
    assert (match.kind, match.layer) == ("exact", "shipped")


def test_user_row_beats_an_equal_shipped_row():
    match = choose(problem(), [("shipped", best()), ("user", best(schedule=point(2, 0)))])
    assert (match.layer, match.schedule) == ("user", point(2, 0))


def test_row_over_all_workloads_is_preferred_unless_one_is_named():
    rows = user(best(workload="8192x4"), best(workload="*", schedule=point(2, 0)), best(workload="1x8192"))
    assert choose(problem(), rows).row.workload == "*"
    assert choose(problem(), rows, "1x8192").row.workload == "1x8192"
    assert choose(problem(), rows, "77x3").row.workload == "*"


def test_stale_row_is_used_with_one_warning_that_names_the_command(tmp_path):
    database = Database(tmp_path / "t.sqlite", shipped=False)
    database.store.put_best(best(template_digest="old"))
    with pytest.warns(TuningWarning, match="qla-tune --arch sm90 --kernels fused_forward --heads 16:64 --head-dim 128"):
        match = database.lookup(problem())
    assert (match.kind, match.stale, match.schedule) == ("stale", True, point(2, 4, "r"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        database.lookup(problem())


def test_command_repeats_what_differs_from_the_defaults():
    asked = problem(4, 8, head_dim_k=64, dtype="float16", state_dtype="bfloat16", state_v_first=True, chunk_size=32)
    text = command(asked)
    assert text.startswith("qla-tune --arch sm90 --kernels fused_forward --heads 4:8 --head-dim 64:128")
    assert text.endswith("--dtype float16 --state-dtype bfloat16 --state-v-first --chunk-size 32")
    asked = OpConfig(4, 8, gate_dtype="bfloat16", beta_dtype="float16").problem("input_activation")
    assert "--kernels input_activation" in command(asked)
    assert command(asked).endswith("--gate-dtype bfloat16 --beta-dtype float16")
    text = command(problem(4, 8, "kkt_inverse"))
    assert text == "qla-tune --arch sm90 --kernels kkt_inverse --heads 4:8 --head-dim 128"


def test_rows_of_a_gone_kernel_do_not_stop_a_lookup(tmp_path):
    database = Database(add_rows_of_a_gone_kernel(tmp_path / "t.sqlite"), shipped=False)
    assert database.lookup(problem()).kind == "default"
    database.store.put_best(best())
    match = database.lookup(problem())
    assert (match.kind, database.siblings(match), database.trials()) == ("exact", [best()], [])


def test_lookup_sees_rows_that_another_process_stored(tmp_path):
    reader = Database(tmp_path / "t.sqlite", shipped=False)
    assert reader.lookup(problem()).kind == "default"
    with Database(tmp_path / "t.sqlite", shipped=False) as writer:
        writer.store.put_best(best())
    assert reader.lookup(problem()).kind == "exact"


@pytest.mark.wall_clock
def test_repeated_lookup_takes_microseconds(tmp_path):
    database = Database(tmp_path / "t.sqlite", shipped=False)
    database.store.add(best=[best(problem_=problem(h, h * r)) for h in range(1, 33) for r in (1, 2, 4)])
    database.lookup(problem())
    times = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(100):
            database.lookup(problem())
        times.append((time.perf_counter() - started) / 100)
    assert min(times) < 200e-6


def test_user_rows_lie_over_shipped_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(layers.resources, "files", lambda package: tmp_path)
    rows = [best(), best(problem_=problem(8, 32), schedule=point(2, 0))]
    (tmp_path / "sm90.jsonl").write_text(jsonl.dumps(rows))
    database = Database(tmp_path / "user" / "t.sqlite")
    assert database.lookup(problem()).layer == "shipped"
    database.store.put_best(best(schedule=point(0, 2)))
    assert database.lookup(problem()).schedule == point(0, 2)
    assert database.lookup(problem(8, 32)).layer == "shipped"


def test_built_copy_is_used_only_while_it_matches_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(layers.resources, "files", lambda package: tmp_path)
    source = tmp_path / "sm90.jsonl"
    source.write_text(jsonl.dumps([best()]))
    load_tool("build_db").build(source, tmp_path / "sm90.sqlite")
    reads = []
    original = jsonl.loads
    monkeypatch.setattr(layers.jsonl, "loads", lambda *a: (reads.append(1), original(*a))[1])
    assert layers.shipped_rows("sm90") == [best()]
    assert reads == []
    source.write_text(jsonl.dumps([best(median=70.0)]))
    assert layers.shipped_rows("sm90") == [best(median=70.0)]
    assert reads == [1]


def test_copy_that_an_older_version_built_is_passed_over_for_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(layers.resources, "files", lambda package: tmp_path)
    (tmp_path / "sm90.jsonl").write_text(jsonl.dumps([best()], fits=[cost_model()]))
    load_tool("build_db").build(tmp_path / "sm90.jsonl", tmp_path / "sm90.sqlite")
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, ("CREATE TABLE extra (id TEXT) STRICT",)])
    assert (layers.shipped_rows("sm90"), layers.shipped("sm90").fits) == ([best()], [cost_model()])


def test_users_fits_come_before_shipped_ones_and_are_seen_when_they_change(tmp_path, monkeypatch):
    theirs, ours = cost_model(rows=7), cost_model(rows=8)
    monkeypatch.setattr(layers, "shipped", lambda arch: jsonl.Records(fits=[theirs]))
    database = Database(tmp_path / "t.sqlite")
    assert database.fits(problem()) == [theirs]
    database.store.add(fits=[ours])
    assert database.fits(problem()) == [ours, theirs]
    assert database.fits(problem(dtype="float16")) == []


def test_import_needs_no_tuner_and_no_compiler():
    code = (
        "import sys, qla_jit.db; from qla_jit.db import open_db; open_db('/nonexistent/x.sqlite').best_rows('sm90');"
        "print([m for m in ('optuna', 'tilelang', 'torch', 'sqlite_utils', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
