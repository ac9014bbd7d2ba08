"""A Gated DeltaNet layer of Qwen3.5: its heads, the batches it sees, and what a call costs and how wrong it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import OpConfig
from ..numerics import Inputs, make_inputs, relative_error
from ..reference import chunk_reference
from ..tune.measure import Bench
from ..workload import lengths_of

HEADS = (16, 64)  # query/key and value heads of the largest Qwen3.5 on one card
CPU_HEADS = (2, 8)  # the same layer as one of eight cards sees it
CUDA_SHAPES = ("1x8192", "8192x4", "1024x8", "1x1")
CPU_SHAPES = ("1x2048", "256x8", "1x1")
SAMPLES = 30
CHECKED_HEADS = 2  # query/key heads compared with float64; heads are independent, and all of them would fill the card

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One implementation on one batch: time, the larger relative error of output and final state, what is special."""

    shape: str
    time_us: float
    error: float
    note: str = ""


def layer_config(arch: str) -> OpConfig:
    return OpConfig(*HEADS, arch=arch)


def inputs_of(shape: str, device: str) -> Inputs:
    """bf16 tensors of the layer on a card, fp32 ones of its TP 8 share on the CPU."""
    heads, dtype = (HEADS, torch.bfloat16) if device == "cuda" else (CPU_HEADS, torch.float32)
    return make_inputs(lengths_of(shape), *heads, dtype=dtype, device=device, gates="bench", draw_on=device)


def qla_jit_call(x: Inputs) -> Run:
    from ..api import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(
        *x.tokens, scale=x.scale, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
        cu_seqlens_cpu=x.cu_host,
    )  # fmt: skip


def measure(shape: str, device: str, make_call: Callable[[Inputs], Run]) -> Row:
    """Check one call against float64, then time it: CUDA-graph replays with a cold L2, or wall time on the CPU.

    make_call: the inputs → a call without arguments that returns (o ``[1, T, HV, V]``, final ``[N, HV, K, V]``).
    """
    with torch.no_grad():
        x = inputs_of(shape, device)
        call = make_call(x)
        error = error_of(x, *call())
        time_us, note = _cuda_time_us(call) if device == "cuda" else (_cpu_time_us(call), "")
    if device == "cuda":
        del x, call
        torch.cuda.empty_cache()  # the peers that follow are other processes
    return Row(shape, time_us, error, note)


def error_of(x: Inputs, o: torch.Tensor, final: torch.Tensor) -> float:
    """The larger relative error of o and the final state over the first `CHECKED_HEADS` key heads."""
    heads = min(CHECKED_HEADS, x.q.shape[2])
    values = heads * (x.v.shape[2] // x.q.shape[2])
    want_o, want_final = chunk_reference(
        x.q[:, :, :heads], x.k[:, :, :heads], x.v[:, :, :values], x.g[:, :, :values], x.beta[:, :, :values], x.scale,
        x.initial_state[:, :values], x.cu_host,
    )  # fmt: skip
    return max(relative_error(o[:, :, :values], want_o), relative_error(final[:, :values], want_final))


def _cuda_time_us(call: Run) -> tuple[float, str]:
    """Median time and a note; a call that cannot be captured is timed with its host overhead."""
    bench, note = Bench("cuda"), ""
    torch.cuda.synchronize()
    try:
        replay = _capture(call)
    except Exception as error:
        torch.cuda.synchronize()
        replay, note = call, f"no CUDA graph ({type(error).__name__})"
    events = []
    for _ in range(SAMPLES + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        bench.flush()
        start.record()
        replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events[3:]), note


def _capture(call: Run) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _cpu_time_us(call: Run) -> float:
    """Median wall time of at least three calls and half a second."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.5:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
