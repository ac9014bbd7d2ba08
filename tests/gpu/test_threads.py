"""Threads that share an operator: each has its own addresses, intermediates and stream, so results are those of one."""

import threading

import pytest
import torch

from qla_jit import chunk_gated_delta_rule
from qla_jit.numerics import make_inputs

pytestmark = pytest.mark.gpu

HEADS = (2, 8, 128, 128)
THREADS, TIMES = 8, 40


def step(x, leaves, do, dfinal):
    o, final = chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=True,
        cu_seqlens=x.cu_seqlens,
        cu_seqlens_cpu=x.cu_host,
    )
    return o, final, *torch.autograd.grad([o, final], leaves, [do, dfinal])


@pytest.mark.parametrize("streams", ["one", "own"])
@pytest.mark.parametrize("lengths", [(300, 70), (8192, 900)], ids=["whole", "split"])
def test_steps_of_threads_have_the_bits_of_steps_alone(streams, lengths):
    cases = []
    for seed in range(THREADS):
        x = make_inputs(lengths, *HEADS, device="cuda", seed=seed)
        leaves = [t.requires_grad_() for t in (*x.tokens, x.initial_state)]
        given = torch.randn_like(x.v), torch.randn_like(x.initial_state)
        cases.append((x, leaves, *given))
    wanted = [step(*case) for case in cases]
    torch.cuda.synchronize()
    wrong = []

    def run(case, want):
        stream = torch.cuda.Stream() if streams == "own" else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(TIMES):
                if not all(torch.equal(a, b) for a, b in zip(step(*case), want)):
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=run, args=pair) for pair in zip(cases, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
