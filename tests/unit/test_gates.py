"""Which heads forget, against the windows that the reference finds, and a layer that learns it from its calls."""

import math

import pytest
import torch

from qla_jit import WindowShare, chunk_gated_delta_rule, validate, window_share_of
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


def gates(percent, tokens=300):
    return make_inputs((tokens,), 1, 16, 64, 64, gates=f"mild:{percent}", seed=percent)


def shares_of_calls(monkeypatch):
    """The share that each later call is planned by."""
    seen, real = [], validate.check_flags

    def check(scale, chunk_size, auto_cp, window, window_share):
        seen.append(window_share)
        real(scale, chunk_size, auto_cp, window, window_share)

    monkeypatch.setattr(validate, "check_flags", check)
    monkeypatch.setattr(validate, "_calls", {})
    return seen


def test_a_layer_learns_its_share_from_its_first_call(monkeypatch):
    seen, layer, x = shares_of_calls(monkeypatch), WindowShare(), gates(50)
    for _ in range(3):
        chunk_gated_delta_rule(*x.tokens, window_share=layer)
    assert layer.value == 0.5 and seen == [None, 0.5]  # the third is the second again


def test_one_call_in_so_many_is_looked_at_and_small_changes_are_not_followed():
    layer, shares = WindowShare(every=3), []
    for percent in (50, 0, 0, 0, 5, 100, 5, 100):  # of 16 heads; the calls in turn are 0, 3 and 6
        chunk_gated_delta_rule(*gates(percent).tokens, window_share=layer)
        shares.append(layer.known())
    assert shares == [0.5] * 3 + [0.0] * 3 + [1 / 16] * 2
    layer.LEAST_CHANGE = 0.1
    chunk_gated_delta_rule(*gates(0).tokens, window_share=layer)
    chunk_gated_delta_rule(*gates(0).tokens, window_share=layer)
    assert layer.known() == 1 / 16


def test_a_layer_learns_from_what_its_logits_mean():
    x, layer = gates(100), WindowShare()
    a_log = torch.tensor([-20.0] * 4 + [1.0] * 12)
    logits = torch.zeros_like(x.g).requires_grad_()
    tokens = (x.q, x.k, x.v, logits, x.beta)
    o, _ = chunk_gated_delta_rule(*tokens, window_share=layer, use_gate_in_kernel=True, A_log=a_log)
    assert layer.value == 0.75 and o.requires_grad


@pytest.mark.parametrize(
    "given", [dict(window=EXACT), dict(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=True)], ids=str
)
def test_a_layer_learns_nothing_where_nothing_is_forgotten(given):
    layer = WindowShare()
    chunk_gated_delta_rule(*gates(50).tokens, window_share=layer, **given)
    assert layer.known() is None


def test_a_malformed_call_teaches_nothing():
    layer, x = WindowShare(), gates(50)
    with pytest.raises(InputError):
        chunk_gated_delta_rule(x.q, x.k, x.v, x.g[:, :-1], x.beta, window_share=layer)
    assert layer.value is None
    with pytest.raises(InputError, match="every >= 1"):
        WindowShare(every=0)


def test_a_share_counts_when_it_has_arrived_and_is_not_waited_for():
    class Event:
        done = False

        def query(self):
            return self.done

    layer, x = WindowShare(every=1), gates(50)
    layer._host, layer._arrived = torch.tensor(0.25), Event()  # as on a card, between a call and its end
    chunk_gated_delta_rule(*x.tokens, window_share=layer)
    assert layer.known() is None  # and nothing else was sent meanwhile
    layer._arrived.done = True
    assert layer.known() == 0.25 and layer._arrived is None
    chunk_gated_delta_rule(*x.tokens, window_share=layer)
    assert layer.known() == 0.5


def test_a_traced_call_uses_what_is_known():
    layer, x = WindowShare(), gates(50)
    layer.value = 0.5
    traced = torch.compile(
        lambda *tokens: chunk_gated_delta_rule(*tokens, window_share=layer), backend="eager", fullgraph=True
    )
    want = chunk_gated_delta_rule(*x.tokens, window_share=0.5)[0]
    assert torch.equal(traced(*x.tokens)[0], want) and layer.value == 0.5 and layer._calls == 0
