"""Padding rows, on CPU tensors: the logic does not depend on the device."""

from types import SimpleNamespace

import pytest
import torch

from qla_jit import dispatch


@pytest.mark.parametrize("known", [True, False])
def test_rows_past_the_last_sequence_are_zero_even_where_they_held_nan(known):
    o = torch.full((1, 10, 2, 4), float("nan"))
    o[:, :7] = 1.0
    call = SimpleNamespace(batch=1, num_tokens=10, device=o.device, cu_host=(0, 3, 7) if known else None)
    gates = o[..., 0].clone()
    dispatch._clear_padding(call, torch.tensor([0, 3, 7], dtype=torch.int32), o, gates)
    for x in (o, gates):
        assert (x[:, :7] == 1).all() and (x[:, 7:] == 0).all()
