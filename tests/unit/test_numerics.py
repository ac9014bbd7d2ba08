"""The error metric cannot be fooled, and inputs are what they say."""

import math

import pytest
import torch

from qla_jit.errors import InputError
from qla_jit.numerics import GATES, make_inputs, relative_error, relative_errors, tolerance


def test_relative_error_is_a_ratio_of_norms():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), want) == 1.0


def test_relative_error_works_in_float64():
    want = torch.full((4,), 60000.0, dtype=torch.float16)  # its square overflows float16, and its norm too
    assert relative_error(want, want.double() * 1.01) == pytest.approx(0.01 / 1.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_values_are_infinitely_wrong(bad):
    x, want = torch.tensor([1.0, bad]), torch.tensor([1.0, 1.0])
    assert relative_error(x, want) == math.inf and relative_error(want, x) == math.inf
    assert relative_error(x, x) == math.inf


def test_a_zero_reference_asks_for_zeros():
    zero = torch.zeros(3)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(torch.full((3,), 1e-20), zero) == math.inf
    assert relative_error(torch.empty(0, 2), torch.empty(0, 2)) == 0.0


def test_relative_error_refuses_to_broadcast():
    with pytest.raises(InputError, match=r"got.shape == want.shape"):
        relative_error(torch.ones(1), torch.ones(3))


def test_tolerance_is_twice_the_peer_plus_a_rounding():
    want, peer = torch.tensor([1.0, 0.0]), torch.tensor([1.001, 0.0])
    assert tolerance(peer, want, torch.bfloat16) == pytest.approx(2e-3 + 2.0**-8, rel=1e-3)
    assert tolerance(peer, want, torch.float16) == pytest.approx(2e-3 + 2.0**-11, rel=1e-3)


def test_inputs_have_the_documented_shapes_and_dtypes():
    x = make_inputs([3, 0, 4], 2, 4, 16, 8, dtype=torch.float16)
    assert x.q.shape == x.k.shape == (1, 7, 2, 16) and x.v.shape == (1, 7, 4, 8)
    assert x.q.dtype == x.k.dtype == x.v.dtype == torch.float16
    assert x.g.shape == x.beta.shape == (1, 7, 4) and x.g.dtype == x.beta.dtype == torch.float32
    assert x.initial_state.shape == (3, 4, 16, 8) and x.initial_state.dtype == torch.float32
    assert x.cu_host == (0, 3, 3, 7) and x.cu_seqlens.tolist() == [0, 3, 3, 7] and x.cu_seqlens.dtype == torch.int32
    assert x.scale == 0.25
    torch.testing.assert_close(x.k.float().norm(dim=-1), torch.ones(1, 7, 2), rtol=2e-3, atol=0)
    assert ((x.beta > 0) & (x.beta < 1)).all()


def test_a_seed_names_the_inputs():
    first, again, other = (make_inputs([9], seed=s) for s in (1, 1, 2))
    for a, b, c in zip(first.tokens, again.tokens, other.tokens):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_gates_are_as_violent_as_named():
    g = {kind: make_inputs([500], 1, 8, 8, 8, gates=kind).g for kind in GATES}
    assert (g["none"] == 0).all()
    assert (g["mild"] < 0).all() and g["mild"].min() > -0.5
    assert g["violent"].min() < -45 and 0.4 < (g["violent"] == 0).float().mean() < 0.6
    still = (g["bench"] == 0).all(1).sum().item()
    assert still == 2 and (g["bench"] < 0).any(1).sum() == 6
    with pytest.raises(InputError, match="gates"):
        make_inputs([1], gates="wild")
    for gates in ("mild:", "mild:101", "mild:-1", "mild:a", "violent:50"):
        with pytest.raises(InputError, match="P of 0 to 100"):
            make_inputs([1], gates=gates)


@pytest.mark.parametrize(("percent", "decaying"), [(0, 0), (1, 1), (50, 4), (75, 6), (99, 8), (100, 8)])
def test_a_share_of_the_heads_decays(percent, decaying):
    g = make_inputs([9], 1, 8, 8, 8, gates=f"mild:{percent}").g
    assert int((g < 0).all(1).sum()) == decaying and int((g == 0).all(1).sum()) == 8 - decaying


def test_bench_gates_decay_on_three_quarters_of_the_heads():
    for heads in (1, 2, 6, 8):
        bench, mild = (make_inputs([9], 1, heads, 8, 8, gates=gates) for gates in ("bench", "mild:75"))
        assert torch.equal(bench.g, mild.g) and torch.equal(bench.initial_state, mild.initial_state)


def test_knobs_for_keys_and_beta():
    same = make_inputs([5], 1, 1, 16, 16, torch.float32, key_correlation=1.0, beta=1.0)
    torch.testing.assert_close(same.k[0, 1:], same.k[0, :1].expand(4, 1, 16))
    assert (same.beta == 1).all() and (make_inputs([5], beta=0.0).beta == 0).all()
    k = make_inputs([200], 1, 1, 64, 64, torch.float32, key_correlation=0.5).k[0, :, 0]
    off = (k @ k.T).tril(-1)
    assert 0.4 < off.sum() / (200 * 199 / 2) < 0.6


def test_errors_of_many_are_those_of_each():
    gen = torch.Generator().manual_seed(0)
    want = [torch.randn(5, 3, generator=gen), torch.zeros(2), torch.ones(4), torch.ones(4)]
    got = [want[0] * 1.01, torch.zeros(2), torch.full((4,), float("nan")), torch.ones(4) * 2]
    found = relative_errors(zip(got, want))
    assert found == [relative_error(*pair) for pair in zip(got, want)]
    assert found == [pytest.approx(0.01, rel=1e-5), 0.0, math.inf, 1.0] and relative_errors([]) == []
    with pytest.raises(InputError, match="got.shape == want.shape"):
        relative_errors([(want[0], want[0]), (want[0], want[1])])
