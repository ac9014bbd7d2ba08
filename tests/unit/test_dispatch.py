"""Cumulative lengths on the device and padding rows, on CPU tensors: the logic does not depend on the device."""

import pytest
import torch

from qla_jit import dispatch
from qla_jit.validate import validate


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.setattr(dispatch, "_bounds", type(dispatch._bounds)())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def call(batch=1, tokens=70, cu=None):
    q, k = (torch.zeros(batch, tokens, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(batch, tokens, 2, 64, dtype=torch.bfloat16)
    g, beta = (torch.zeros(batch, tokens, 2) for _ in range(2))
    return validate(q, k, v, g, beta, cu_seqlens=cu)


def test_int32_lengths_are_used_as_they_are():
    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    assert dispatch._device_bounds(call(cu=cu)) is cu


def test_int64_lengths_are_converted_once_per_content_not_per_tensor():
    first = dispatch._device_bounds(call(cu=torch.tensor([0, 30, 70])))
    again = dispatch._device_bounds(call(cu=torch.tensor([0, 30, 70])))
    other = dispatch._device_bounds(call(cu=torch.tensor([0, 31, 70])))
    assert first is again and first.dtype == torch.int32
    assert other.tolist() == [0, 31, 70]


def test_dense_batches_get_their_multiples():
    assert dispatch._device_bounds(call(batch=3, tokens=70)).tolist() == [0, 70, 140, 210]


def test_cache_of_lengths_is_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_CACHED_BOUNDS", 4)
    for n in range(1, 10):
        dispatch._device_bounds(call(tokens=n))
    assert len(dispatch._bounds) == 4


def test_nothing_made_during_a_graph_capture_is_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch._device_bounds(call(batch=2))
    assert not dispatch._bounds


@pytest.mark.parametrize("known", [True, False])
def test_rows_past_the_last_sequence_are_zero_even_where_they_held_nan(known):
    o = torch.full((10, 2, 4), float("nan"))
    o[:7] = 1.0
    dispatch._clear_padding(o, torch.tensor([0, 3, 7], dtype=torch.int32), (0, 3, 7) if known else None)
    assert (o[:7] == 1).all() and (o[7:] == 0).all()
