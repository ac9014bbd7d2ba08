"""A layer that learns on the card which share of its heads forgets: without waiting, and not from a graph."""

import pytest
import torch

from qla_jit import WindowShare, chunk_gated_delta_rule, window_share_of
from qla_jit.numerics import make_inputs, relative_error

pytestmark = pytest.mark.gpu


def layer_call(x, layer):
    with torch.no_grad():
        return chunk_gated_delta_rule(*x.tokens, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host, window_share=layer)[
            0
        ]


@pytest.mark.parametrize("percent", [0, 25, 100])
def test_a_layer_learns_its_share_and_its_results_stay_within_rounding(percent):
    x = make_inputs((16384, 900), 2, 8, 128, 128, device="cuda", gates=f"mild:{percent}", seed=percent)
    layer = WindowShare()
    before = layer_call(x, layer)
    torch.cuda.synchronize()
    assert layer.known() == percent / 100 == window_share_of(x.g)
    assert relative_error(layer_call(x, layer), before) < 5e-3


def test_looking_does_not_wait_for_the_card():
    """Behind seconds of work the answer is not there yet, and the call has returned."""
    x = make_inputs((4096,), 2, 8, 128, 128, device="cuda", gates="mild:50")
    layer_call(x, WindowShare())  # loads what the first look needs, which may take as long
    torch.cuda.synchronize()
    layer = WindowShare()
    torch.cuda._sleep(6_000_000_000)
    layer_call(x, layer)
    assert layer.known() is None and layer._arrived is not None
    torch.cuda.synchronize()
    assert layer.known() == 0.5


def test_a_captured_call_learns_nothing():
    x = make_inputs((4096,), 2, 8, 128, 128, device="cuda", gates="mild:50")
    layer = WindowShare()
    layer_call(x, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer_call(x, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer_call(x, layer)
    graph.replay()
    torch.cuda.synchronize()
    assert layer.known() is None
