#!/usr/bin/env python3
"""Host time of a warmed call above its launches: everything runs but the kernels, which are replaced by nothing.

    python tools/host_cost.py [--calls 2000] [--json]

On a card tensors, allocations and streams are those of the card; elsewhere CPU tensors take the same way.  Prints the
median over rounds of the mean time of a call in microseconds, per signature.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch

from qla_jit import Workspace, chunk_gated_delta_rule, dispatch, op, validate
from qla_jit.numerics import make_inputs

ROUNDS = 15
HEADS = (16, 64, 128, 128)
LENGTHS = (100, 28, 128)


def without_kernels(on_card: bool) -> None:
    """Replace building, loading and launching for the rest of the process."""
    op.build.ensure = lambda spec, store: SimpleNamespace(spec=spec, report={})
    op.runtime.load = lambda artifact: lambda *arguments: None
    if not on_card:
        dispatch._arch_name = lambda index: "sm90"
        dispatch._has_several_cards = lambda: False
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
        validate.Call.runs_kernels = property(lambda call: not call.is_empty)


def signatures(device: str) -> dict[str, dict]:
    """Keyword arguments of the calls that are timed."""
    x = make_inputs(LENGTHS, *HEADS, device=device)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), x.tokens))
    host = torch.tensor(x.cu_host, dtype=torch.int32)
    ragged = tokens | dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=host)
    states = ragged | dict(initial_state=x.initial_state, output_final_state=True)
    rows = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    outputs = dict(out=torch.empty_like(x.v), final_state_out=torch.empty_like(x.initial_state))
    return {
        "dense": tokens,
        "ragged, states": states,
        "ragged int64, states": states | dict(cu_seqlens=x.cu_seqlens.long(), cu_seqlens_cpu=host.long()),
        "ragged, pool": states | dict(state_indices=rows),
        "ragged, nothing allocated": states | outputs | dict(workspace=Workspace()),
    }


def host_us(kwargs: dict, calls: int) -> float:
    """Median over rounds of the mean host time of a call."""
    times = []
    with torch.no_grad():
        chunk_gated_delta_rule(**kwargs)
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(calls):
                chunk_gated_delta_rule(**kwargs)
            times.append((time.perf_counter() - began) / calls)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls per round")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    on_card = torch.cuda.is_available()
    without_kernels(on_card)
    for name, kwargs in signatures("cuda" if on_card else "cpu").items():
        row = {"signature": name, "host_us": round(host_us(kwargs, options.calls), 2), "cuda": on_card}
        print(json.dumps(row) if options.json else f"{row['host_us']:8.2f} us  {name}")


if __name__ == "__main__":
    main()
