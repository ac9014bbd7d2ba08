"""tools/train_memory.py: its arithmetic, with the numbers of an allocator that counts what it is told."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import train_memory  # noqa: E402

from qla_jit.numerics import make_inputs  # noqa: E402


@pytest.fixture
def allocator(monkeypatch):
    """``allocator.used`` is what is allocated now; the peak follows it."""

    class Allocator:
        used = peak = 1000

        def use(self, size: int) -> None:
            self.used += size
            self.peak = max(self.peak, self.used)

    found = Allocator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(found, "peak", found.used))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: found.used)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: found.peak)
    return found


def test_a_step_counts_from_its_inputs_and_forgets_the_first(allocator):
    class Step(torch.autograd.Function):
        first = True

        @staticmethod
        def forward(ctx, x):
            allocator.use(5000 if Step.first else 70)
            return x.clone(), x.clone()

        @staticmethod
        def backward(ctx, d, dfinal):
            allocator.use(200)
            allocator.use(-270 if not Step.first else -4200)  # caches of the first step stay
            Step.first = False
            return d

    x = torch.ones(3, requires_grad=True)
    assert train_memory.step_bytes(Step.apply, [x], [torch.ones(3)] * 2) == (70, 270)
    assert allocator.used == 2000


def test_inputs_and_rows_are_per_token(monkeypatch):
    made = []
    monkeypatch.setattr(train_memory, "make_inputs", lambda *given, **_: made.append(given) or make_inputs(*given))
    monkeypatch.setattr(train_memory, "step_bytes", lambda *given: (512 * 1024, 1024 * 1024))
    row = train_memory.measure("qla_jit", 2, 8, 128)
    assert made == [((128,), 2, 8, 128, 128)]
    # q, k: 2 heads of 128 in bf16; v and the gradient of o: 8 of them; g, beta: fp32; a state and its gradient: fp32.
    assert row.inputs == 2 * 2 * 128 * 2 + 2 * 8 * 128 * 2 + 2 * 8 * 4 + 2 * 8 * 128 * 128 * 4 / 128
    assert (row.kept, row.peak, row.note) == (4096, 8192, "")
    assert "| 2/8 | 128 | qla_jit | 13.1 | 4.0 | 8.0 |  |" in train_memory.table([row])


def test_a_provider_that_is_missing_or_fails_has_a_note(monkeypatch):
    def fail(*given):
        raise ValueError("no such kernel")

    monkeypatch.setattr(train_memory, "make_inputs", lambda *given, **_: make_inputs(*given))
    monkeypatch.setattr(train_memory, "step_bytes", fail)
    assert train_memory.measure("qla_jit", 1, 2, 16).note == "ValueError: no such kernel"
    monkeypatch.setattr(train_memory, "find_spec", lambda name: None)
    row = train_memory.measure("fla", 1, 2, 16)
    assert row.note == "not installed" and "| fla | 17.5 | – | – | not installed |" in train_memory.table([row])


def test_a_machine_without_a_card_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        train_memory.main([])
    assert "a CUDA card must be present to measure its memory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_memory.main(["--providers", "triton"])
    assert "but got ['triton']" in capsys.readouterr().err
