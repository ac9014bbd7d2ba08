"""Training on a card, beyond what the contract asks of every device: CUDA graphs, memory, several processes."""

import pytest
import torch
import training_processes

from qla_jit import chunk_gated_delta_rule
from qla_jit.numerics import make_inputs, relative_error

pytestmark = pytest.mark.gpu

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True)


def captured(step, warmups: int = 3):
    """(graph of a step, its outputs)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


@pytest.mark.parametrize("lengths", [(300, 0, 64, 5), (3000, 200)], ids=str)
@pytest.mark.parametrize("flags", [dict(), FLAGS], ids=["plain", "flags"])
def test_a_captured_forward_and_backward_give_the_bits_of_eager_ones(lengths, flags):
    x, later = (make_inputs(lengths, 2, 4, device="cuda", seed=seed, gates="bench") for seed in (1, 2))
    leaves = [t.clone().requires_grad_() for t in (*x.tokens, x.initial_state)]
    if flags:
        flags = flags | dict(A_log=torch.linspace(-2, 0.5, 4, device="cuda", requires_grad=True))
    wanted = [*leaves, *(t for t in flags.values() if isinstance(t, torch.Tensor))]
    do, dfinal = torch.randn_like(x.v), torch.randn_like(x.initial_state)

    def step():
        outputs = chunk_gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=x.cu_host, **flags,
        )  # fmt: skip
        return *outputs, *torch.autograd.grad(outputs, wanted, (do, dfinal))

    graph, got = captured(step)
    with torch.no_grad():
        for leaf, new in zip(leaves, (*later.tokens, later.initial_state)):
            leaf.copy_(new)
    want = step()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_captured_training_step_of_a_model_is_an_eager_one():
    model, batch = training_processes.model_on("cuda"), training_processes.batch_of(0, "cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = {name: x.clone() for name, x in model.state_dict().items()}

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = captured(step)
    losses = []
    for run in (graph.replay, step):
        model.load_state_dict(start)
        for _ in range(5):
            found = run()
        losses.append((loss if found is None else found).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] < model_loss(start, batch)


def model_loss(state: dict, batch) -> float:
    model = training_processes.model_on("cuda")
    model.load_state_dict(state)
    with torch.no_grad():
        return model(batch).mean().item()


def test_a_forward_keeps_its_inputs_and_nothing_else():
    x = make_inputs((4096,), 2, 8, device="cuda")
    leaves = [t.requires_grad_() for t in x.tokens]
    call = lambda: chunk_gated_delta_rule(*leaves, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host)[0]
    call().sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o = call()
    assert torch.cuda.memory_allocated() - before <= o.numel() * o.element_size() + 4096


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_gradients_in_several_processes_are_the_average_of_one(tmp_path, wrapper):
    """As many cards as there are, two at most; on one card the wrapper around one process."""
    world = min(2, torch.cuda.device_count())
    wanted = training_processes.averaged_gradients(world, "cuda")
    found = training_processes.run(world, wrapper, "cuda", tmp_path)
    for name, want in wanted.items():
        assert want.any() and relative_error(found[name], want) < 1e-3, name
