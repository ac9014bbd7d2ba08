"""tools/gradient_errors.py: its batches are what they say, and its errors are those of what it is given."""

import pytest
import torch
from tool_files import load_tool


@pytest.fixture(scope="module")
def tool():
    return load_tool("gradient_errors")


def test_gates_of_a_model_differ_by_head_and_never_grow(tool):
    x = tool.batch_of((1, 8), (200,), "model", 0, "cpu")
    means = x.g.mean((0, 1))
    assert (x.g <= 0).all() and means.min() < 4 * means.max() < 0


def test_errors_are_those_of_the_operator_and_of_the_rounded_chunk_form(tool):
    x = tool.batch_of((1, 2), (70, 5), "bench", 0, "cpu")
    found = tool.errors(x, 1)
    assert list(found) == list(tool.NAMES)
    for own, other in found.values():  # on CPU tensors the operator is the chunk form in fp32, rounded once at the end
        assert own < other < 0.1


def test_it_needs_a_card(tool, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tool.main([])
    assert "CUDA card" in capsys.readouterr().err
