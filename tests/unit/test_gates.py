"""`window_share_of`: which heads forget, against the windows that the kernels' reference finds."""

import math

import pytest
import torch

from qla_jit import chunk_gated_delta_rule, window_share_of
from qla_jit.config import OpConfig
from qla_jit.errors import InputError
from qla_jit.gates import FORGETS_WITHIN
from qla_jit.numerics import make_inputs
from qla_jit.reference import warmup_chunks_reference
from qla_jit.segments import EXACT, cut, least_segment_chunks


@pytest.mark.parametrize("percent", [0, 25, 50, 75, 100])
def test_it_counts_the_heads_whose_windows_hold(percent):
    x = make_inputs((4096,), 1, 8, 64, 64, gates=f"mild:{percent}", seed=percent)
    assert window_share_of(x.g) == percent / 100
    least = least_segment_chunks(OpConfig(1, 8).problem("segment_forward"))
    segments = cut([4096], 64, least, least=least)
    warmup = warmup_chunks_reference(x.g, segments, 1e-4)
    held = sum(segments.window_holds(2, int(count)) for count in warmup[2])
    assert window_share_of(x.g, 1e-4) == held / 8


def test_the_shortest_segment_is_what_it_must_forget_within():
    assert least_segment_chunks(OpConfig(1, 8).problem("segment_forward")) * 64 == FORGETS_WITHIN
    pace = math.log(1e-4) / FORGETS_WITHIN
    g = torch.stack([torch.full((2, 30), pace * factor) for factor in (0.0, 0.99, 1.01, 50.0)], -1)
    assert window_share_of(g, 1e-4) == 0.5 and window_share_of(g, 1e-40) == 0.25
    assert window_share_of(g, EXACT) == 0.0


def test_the_operator_takes_what_it_says():
    x = make_inputs((200,), 1, 2, 64, 64, gates="bench")
    chunk_gated_delta_rule(*x.tokens, window_share=window_share_of(x.g))


@pytest.mark.parametrize(("shape", "window"), [((4, 8), 1e-4), ((1, 0, 8), 1e-4), ((1, 5, 8), 0.0), ((1, 5, 8), 1.0)])
def test_malformed_questions_are_refused(shape, window):
    with pytest.raises(InputError, match="must be"):
        window_share_of(torch.zeros(shape), window)
