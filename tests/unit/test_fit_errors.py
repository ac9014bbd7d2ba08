"""tools/fit_errors.py: the errors of the shipped models, from the recordings that they were fitted on."""

import statistics

import pytest
from tool_files import ROOT, load_tool

from qla_jit.db.layers import shipped
from qla_jit.db.lookup import family
from qla_jit.model.fit import fit_models, left_out_errors, residuals
from qla_jit.model.observation import observations


@pytest.fixture(scope="module")
def tool():
    return load_tool("fit_errors")


def recorded(tool, name):
    return observations(tool.jsonl.loads((ROOT / "docs" / "perf" / name).read_text(), name).trials)


def test_errors_of_a_model_are_those_that_it_was_stored_with(tool):
    found = recorded(tool, "backward_sweep_h200.jsonl")
    model = next(m for m in shipped("sm90").fits if m.problem.kernel == "recompute_state" and m.coefficients[3])
    errors = left_out_errors(model, found)
    assert len(errors) == model.rows == len(residuals(model, found))
    assert statistics.median(errors) == pytest.approx(model.loo_error)


def test_the_limit_of_memory_is_in_the_models_that_it_describes(tool):
    found = [o for o in recorded(tool, "backward_sweep_h200.jsonl") if o.problem.kernel == "recompute_state"]
    kept = next(o for o in found if o.schedule["dv_split"] == 1)
    key = family(kept.problem), kept.schedule
    (model,), _ = fit_models([o for o in found if (family(o.problem), o.schedule) == key])
    a, _, _, m = model.coefficients
    assert 1.2 * a <= m <= 3.1 * a and model.loo_p90 < 0.15
    for measured, predicted in residuals(model, found):
        assert predicted == pytest.approx(measured, rel=0.2)


def test_the_table_has_every_kernel_and_all(tool, capsys):
    tool.main([str(ROOT / "docs" / "perf" / "correct_sweep_h200.jsonl")])
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("| segment_correct | 100 |") and said[3] == said[2].replace("segment_correct", "all")


def test_files_without_rows_are_refused(tool, capsys):
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--arch", "sm120"])
    assert "no row" in capsys.readouterr().err
