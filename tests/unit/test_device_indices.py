"""Index tensors of kernels on CPU tensors: what is kept, for whom, and what never is."""

import pytest
import torch

from qla_jit import device_indices
from qla_jit.validate import validate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch):
    for name in ("_kept", "_ramps", "_ramp_views"):
        monkeypatch.setattr(device_indices, name, type(getattr(device_indices, name))())


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(device_indices, "is_capturing", lambda device: True)


def bounds(batch=1, tokens=70, cu=None):
    q, k = (torch.zeros(batch, tokens, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(batch, tokens, 2, 64, dtype=torch.bfloat16)
    g, beta = (torch.zeros(batch, tokens, 2) for _ in range(2))
    return device_indices.bounds(validate(q, k, v, g, beta, cu_seqlens=cu), cu)


def test_int32_lengths_are_used_as_they_are():
    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    assert bounds(cu=cu) is cu


def test_int64_lengths_are_converted_once_per_content_not_per_tensor():
    first = bounds(cu=torch.tensor([0, 30, 70]))
    again = bounds(cu=torch.tensor([0, 30, 70]))
    other = bounds(cu=torch.tensor([0, 31, 70]))
    assert first is again and first.dtype == torch.int32
    assert other.tolist() == [0, 31, 70]


def test_dense_batches_get_their_multiples():
    assert bounds(batch=3, tokens=70).tolist() == [0, 70, 140, 210]
    assert bounds(batch=3, tokens=70) is bounds(batch=3, tokens=70)


def test_a_stream_never_reads_what_another_one_wrote(monkeypatch):
    """A tensor written on one stream may be read on another before the write, or after its memory went elsewhere."""
    made = {}
    for stream in (7, 8):
        monkeypatch.setattr(device_indices, "_stream", lambda device, stream=stream: stream)
        made[stream] = bounds(cu=torch.tensor([0, 30, 70])), bounds(batch=2)
        assert all(a is b for a, b in zip(made[stream], (bounds(cu=torch.tensor([0, 30, 70])), bounds(batch=2))))
    for a, b in zip(made[7], made[8]):
        assert a.data_ptr() != b.data_ptr() and torch.equal(a, b)


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(device_indices, "_MAX_KEPT", 4)
    for n in range(1, 10):
        bounds(tokens=n)
        assert len(device_indices._kept) <= 4


def test_a_graph_neither_keeps_nor_reads_what_is_kept(monkeypatch):
    eager = bounds(batch=2)
    monkeypatch.setattr(device_indices, "is_capturing", lambda device: True)
    captured = bounds(batch=2)
    assert torch.equal(eager, captured) and eager is not captured
    bounds(batch=3)
    assert [t for t in device_indices._kept.values()] == [eager]


def test_ramps_grow_and_share_memory():
    small = device_indices.ramp(3, CPU)
    assert small.tolist() == [0, 1, 2] and small.dtype == torch.int32 and small is device_indices.ramp(3, CPU)
    large = device_indices.ramp(5000, CPU)
    assert torch.equal(large, torch.arange(5000, dtype=torch.int32))
    assert device_indices.ramp(3, CPU) is small  # a graph may read it
    assert device_indices.ramp(4, CPU).data_ptr() == large.data_ptr()
    assert device_indices.ramp(0, CPU).shape == (0,)


def test_a_graph_reads_a_ramp_only_if_it_was_there_before(capturing):
    assert device_indices.ramp(3, CPU).tolist() == [0, 1, 2]
    assert not device_indices._ramps and not device_indices._ramp_views
