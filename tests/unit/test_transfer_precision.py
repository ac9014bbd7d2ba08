"""In what form a segment's transfer matrix may pass between kernels in 16 bits: rounding, imitated in float64."""

import pytest
import torch
import torch.nn.functional as F

from qla_jit.numerics import relative_error
from qla_jit.reference import kkt_inverse_reference

DIM, CHUNK, CHUNKS, PER_SEGMENT = 128, 64, 64, 8


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def keys(kind: str, gen: torch.Generator) -> torch.Tensor:
    """[tokens, DIM]: independent, in a subspace, or few directions again and again."""
    tokens = CHUNK * CHUNKS

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    if kind == "subspace":
        drawn = normal(tokens, 16) @ normal(16, DIM)
    elif kind == "repeated":
        drawn = normal(24, DIM)[torch.randint(0, 24, (tokens,), generator=gen)] + 0.05 * normal(tokens, DIM)
    else:
        drawn = normal(tokens, DIM)
    return rounded(F.normalize(drawn, dim=-1))


def walk(k, x, values, state, operand):
    """S ← S + Xᵀ (V − K S) over chunks; products take ``operand`` of S and Y, sums are exact."""
    for chunk in range(len(k)):
        state = state + x[chunk].mT @ operand(values[chunk] - k[chunk] @ operand(state))
    return state


def errors(kind: str, strength: float) -> dict[str, float]:
    """Relative error of the final state: of one whole walk, and of segments joined by M, by D, by D in two terms."""
    gen = torch.Generator().manual_seed(1)
    k = keys(kind, gen)
    beta = strength * torch.rand(len(k), generator=gen, dtype=torch.float64)
    v = rounded(torch.randn(k.shape, generator=gen, dtype=torch.float64)).unflatten(0, (-1, CHUNK))
    initial = torch.randn(DIM, DIM, generator=gen, dtype=torch.float64)
    a = kkt_inverse_reference(k[None, :, None], beta[None, :, None])[:CHUNKS, 0]
    k = k.unflatten(0, (-1, CHUNK))
    want = walk(k, a.mT @ k, v, initial, lambda s: s)
    x = rounded(rounded(a).mT @ k)
    found = {"whole": relative_error(walk(k, x, v, initial, rounded), want)}
    zero, identity = torch.zeros_like(initial), torch.eye(DIM, dtype=torch.float64)
    first = walk(k[:PER_SEGMENT], x[:PER_SEGMENT], v[:PER_SEGMENT], initial, rounded)
    joined = dict.fromkeys(("M", "D", "D in two"), first)
    for start in range(PER_SEGMENT, CHUNKS, PER_SEGMENT):
        of = slice(start, start + PER_SEGMENT)
        left = walk(k[of], x[of], v[of], zero, rounded)
        deviation = walk(k[of], x[of], -k[of], zero, rounded)
        lost = rounded(deviation - rounded(deviation))
        by = {"M": rounded(identity + deviation), "D": rounded(deviation), "D in two": rounded(deviation) + lost}
        for form, state in joined.items():
            kept = zero if form == "M" else state
            joined[form] = kept + by[form] @ rounded(state) + left
    return found | {form: relative_error(state, want) for form, state in joined.items()}


@pytest.mark.parametrize(
    ("kind", "strength"), [("independent", 1.0), ("subspace", 1.0), ("repeated", 1.0), ("independent", 0.02)]
)
def test_deviation_in_two_terms_errs_like_a_whole_walk(kind, strength):
    found = errors(kind, strength)
    assert found["D in two"] < 1.15 * found["whole"]
    assert found["D"] < 1.4 * found["whole"]


def test_a_rounded_transfer_matrix_errs_far_more_where_keys_touch_little():
    found = errors("independent", 0.02)
    assert found["M"] > 8 * found["whole"]
