"""Padding rows, on CPU tensors: the logic does not depend on the device."""

import pytest
import torch

from qla_jit import dispatch


@pytest.mark.parametrize("known", [True, False])
def test_rows_past_the_last_sequence_are_zero_even_where_they_held_nan(known):
    o = torch.full((10, 2, 4), float("nan"))
    o[:7] = 1.0
    dispatch._clear_padding(o, torch.tensor([0, 3, 7], dtype=torch.int32), (0, 3, 7) if known else None)
    assert (o[:7] == 1).all() and (o[7:] == 0).all()
