"""Identities of docs/MATH.md that no reference has as its own: both sides in float64, whatever the decay."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F

from qla_jit.numerics import relative_error

C, K, V, CHUNKS = 16, 8, 6, 5
SCALE = K**-0.5
EXACT = 1e-12

every_decay = pytest.mark.parametrize("decay", [0.0, 0.3, 30.0])


@dataclass(frozen=True)
class Chunk:
    """The matrices of one chunk, by the names of docs/MATH.md."""

    q: torch.Tensor  # [C, K]
    k: torch.Tensor
    v: torch.Tensor  # [C, V]
    g: torch.Tensor  # [C]
    beta: torch.Tensor

    @cached_property
    def log_gamma(self):
        return self.g.cumsum(0)

    @cached_property
    def gamma(self):
        return self.log_gamma.exp()[:, None]

    @cached_property
    def tail(self):
        return (self.log_gamma[-1] - self.log_gamma).exp()[:, None]

    @cached_property
    def end(self):
        return self.log_gamma[-1].exp()

    @cached_property
    def ratios(self):
        """Γ."""
        return (self.log_gamma[:, None] - self.log_gamma).tril().exp().tril()

    @cached_property
    def overlap(self):
        """tril(K Kᵀ, −1)."""
        return (self.k @ self.k.T).tril(-1)

    @cached_property
    def gateless(self):
        """A'."""
        return torch.linalg.inv(torch.eye(C, dtype=torch.float64) + self.beta[:, None] * self.overlap)

    @cached_property
    def inverse(self):
        """Ã."""
        return self.gateless * self.beta

    @cached_property
    def p(self):
        return (self.q @ self.k.T).tril()

    @cached_property
    def x(self):
        return self.tail * (self.inverse.T @ self.k)

    def y(self, state):
        return self.v - self.gamma * (self.k @ state)

    def u(self, state):
        return (self.inverse * self.ratios) @ self.y(state)

    def z(self, dstate, do):
        """(17)."""
        du = SCALE * (self.p * self.ratios).T @ do + self.tail * (self.k @ dstate)
        return (self.inverse * self.ratios).T @ du

    def passed(self, dstate, do):
        """(19)."""
        through = SCALE * (self.gamma * self.q).T @ do - (self.gamma * self.k).T @ self.z(dstate, do)
        return self.end * dstate + through


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chunks(decay: float) -> list[Chunk]:
    """β from exactly 0 to nearly 2, gates of mean −decay."""
    found = []
    for n in range(CHUNKS):
        q, k = (F.normalize(normal(C, K, seed=10 * n + i), dim=-1) for i in (1, 2))
        beta = 2 * torch.sigmoid(normal(C, seed=10 * n + 3))
        beta[::5] = 0.0
        found.append(Chunk(q, k, normal(C, V, seed=10 * n + 4), -decay * normal(C, seed=10 * n + 5).square(), beta))
    return found


def transfer_matrix(of_segment: list[Chunk]) -> torch.Tensor:
    """(11), by the two-step form (15)."""
    matrix = torch.eye(K, dtype=torch.float64)
    for c in of_segment:
        matrix = c.end * matrix - c.x.T @ (c.gamma * (c.k @ matrix))
    return matrix


def close(a, b):
    assert relative_error(a, b) < EXACT


@every_decay
def test_gates_leave_the_inverse_as_a_product_by_element(decay):
    for c in chunks(decay):
        gated = torch.eye(C, dtype=torch.float64) + c.beta[:, None] * c.overlap * c.ratios
        close(torch.linalg.inv(gated), c.gateless * c.ratios)  # (4)


@every_decay
def test_both_forms_of_the_effects_give_the_update(decay):
    state = normal(K, V, seed=0)
    for c in chunks(decay):
        u, y = c.u(state), c.y(state)
        effects = y - (c.overlap * c.ratios) @ u
        close(c.beta[:, None] * effects, u)  # (21)
        close(y - ((c.overlap @ c.inverse) * c.ratios) @ y, effects)


@every_decay
def test_both_forms_of_the_gradient_of_v_agree(decay):
    dstate, do = normal(K, V, seed=0), normal(C, V, seed=1)
    for c in chunks(decay):
        b = c.p @ c.inverse
        close(c.x @ dstate + SCALE * (b * c.ratios).T @ do, c.z(dstate, do))  # (18)


@every_decay
def test_transfer_matrix_is_a_product_a_walk_and_what_the_gates_leave_of_the_identity(decay):
    of_segment, eye = chunks(decay), torch.eye(K, dtype=torch.float64)
    product, deviation, before = eye, torch.zeros_like(eye), 1.0
    for c in of_segment:
        product = c.end * (eye - c.k.T @ c.inverse @ c.k) @ product  # (12)
        deviation = c.end * deviation + c.x.T @ (-before * c.gamma * c.k - c.gamma * (c.k @ deviation))  # (16)
        before = before * c.end
    close(transfer_matrix(of_segment), product)
    close(before * eye + deviation, product)


@every_decay
def test_gradient_of_a_state_passes_a_segment_by_the_forwards_transfer_matrix(decay):
    of_segment, dos = chunks(decay), normal(CHUNKS, C, V, seed=7)
    whole, from_zero = normal(K, V, seed=8), torch.zeros(K, V, dtype=torch.float64)
    last = whole
    for c, do in reversed(list(zip(of_segment, dos))):
        whole, from_zero = c.passed(whole, do), c.passed(from_zero, do)
    close(transfer_matrix(of_segment).T @ last + from_zero, whole)  # (20)
