"""tools/train_lm.py at a size for the CPU: its text, its two curves, and what it writes."""

import json

import pytest
import torch
from training_processes import train_lm

SIZES = train_lm.Sizes(width=32, heads=1, value_heads=2, head_dim=16, tokens=128, shortest=3, longest=80)


def test_text_is_fixed_by_the_seed_and_its_digits_by_the_text_before():
    text, recalls = train_lm.Corpus(3).sequence(200)
    assert (text, recalls) == train_lm.Corpus(3).sequence(200) != train_lm.Corpus(4).sequence(200)
    assert len(text) == len(recalls) == 200 and set(text) <= set(train_lm.VOCABULARY)
    digits = {}
    for before, char, recalled in zip(text, text[1:], recalls[1:]):
        if char in train_lm.VALUES:
            assert before in train_lm.KEYS and recalled == (before in digits)
            assert digits.setdefault(before, char) == char
        else:
            assert not recalled
    assert sum(recalls) > 30


def test_batches_are_ragged_and_full():
    corpus, seen = train_lm.Corpus(0), set()
    for _ in range(5):
        batch = corpus.batch(SIZES, "cpu")
        starts, ends = batch.lengths[:-1], batch.lengths[1:]
        assert batch.lengths[-1] == SIZES.tokens and batch.bounds.tolist() == list(batch.lengths)
        assert all(batch.positions[0, a:b].tolist() == list(range(b - a)) for a, b in zip(starts, ends))
        assert all(torch.equal(batch.ids[0, a + 1 : b], batch.targets[0, a : b - 1]) for a, b in zip(starts, ends))
        seen.add(batch.lengths)
    assert len(seen) == 5


def test_sequences_do_not_see_each_other():
    model, batch = train_lm.LanguageModel(SIZES, train_lm.by_operator), train_lm.Corpus(0).batch(SIZES, "cpu")
    first = batch.lengths[1]
    with torch.no_grad():
        losses = model(batch)
        batch.ids[:, :first] = (batch.ids[:, :first] + 1) % len(train_lm.VOCABULARY)
        others = model(batch)
    assert torch.equal(losses[:, first:], others[:, first:]) and not torch.equal(losses, others)


@pytest.fixture(scope="module")
def written(one_thread, tmp_path_factory):
    """The exit code, the lines and the picture of a run of sixty steps."""
    folder = tmp_path_factory.mktemp("train")
    files = ["--out", str(folder / "runs" / "curves.jsonl"), "--plot", str(folder / "curves.png")]
    code = train_lm.main(["--steps", "60", "--device", "cpu", "--commit", "abc", *files], SIZES)
    return code, list(map(json.loads, (folder / "runs" / "curves.jsonl").open())), folder / "curves.png"


def test_both_runs_learn_and_agree(written):
    code, (run, *rows), picture = written
    assert code == 0 and len(rows) == 60 and picture.stat().st_size > 10_000
    assert run["commit"] == "abc" and run["gpu"] == "none" and run["relative_difference"] < 1e-3
    for name in ("qla_jit", "float64"):
        losses = [row[name][0] for row in rows]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
        assert run["final"][name] == pytest.approx(sum(losses[-20:]) / 20, abs=1e-4)
    assert rows[0]["qla_jit"] == pytest.approx(rows[0]["float64"], rel=1e-5)


def test_curves_that_part_are_a_failure(monkeypatch, tmp_path):
    curves = iter(([(2.0, 1.0)] * 30, [(1.97, 1.0)] * 30))
    monkeypatch.setattr(train_lm, "train", lambda *given: next(curves))
    monkeypatch.setattr(train_lm, "plot", lambda *given: None)
    files = ["--out", str(tmp_path / "curves.jsonl")]
    assert train_lm.main(["--device", "cpu", *files], SIZES) == 1
    assert json.loads((tmp_path / "curves.jsonl").open().readline())["relative_difference"] > 0.01
