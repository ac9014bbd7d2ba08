"""Other implementations of the operator, where they are installed, on the batches of `layer`.

Each runs in a process of its own: peers that share one were seen to disturb one another's CUDA graphs, and one that
dies takes nothing with it.

    python -m qla_jit.demo.peers NAME SHAPE ...      (prints one JSON row a line)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..numerics import Inputs
from .layer import Row, Run, measure

TIMEOUT_S = 300.0  # most of it is the peer's own compilation and autotuning
MARK = "ROW "  # peers print too


def _fla(x: Inputs) -> Run:
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA would hand the call to flash_qla, which has a row of its own
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds = x.cu_seqlens.long()
    on_host = bounds.cpu()  # not in the call: a copy to the host cannot be captured into a CUDA graph
    return lambda: chunk_gated_delta_rule(
        *x.tokens, scale=x.scale, initial_state=x.initial_state, output_final_state=True, cu_seqlens=bounds,
        cu_seqlens_cpu=on_host,
    )  # fmt: skip


def _flash_qla(x: Inputs) -> Run:
    from flash_qla import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(
        *x.tokens, scale=x.scale, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
    )


def _flashinfer(x: Inputs) -> Run:
    import torch
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    # FlashInfer wants exp(g), no batch dimension, and states as [N, HV, V, K].
    q, k, v, alpha, beta = x.q[0], x.k[0], x.v[0], x.g[0].exp(), x.beta[0]
    initial = x.initial_state.mT.contiguous()
    o, final = torch.empty_like(v), torch.empty_like(initial)

    def call():
        chunk_gated_delta_rule(
            q, k, v, alpha, beta, scale=x.scale, initial_state=initial, output_final_state=True,
            cu_seqlens=x.cu_seqlens, output=o, output_state=final,
        )  # fmt: skip
        return o[None], final.mT

    return call


PEERS: dict[str, Callable[[Inputs], Run]] = {"fla": _fla, "flash_qla": _flash_qla, "flashinfer": _flashinfer}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def measure_peer(name: str, shapes: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[list[Row], str]:
    """Rows of a peer, and why some are missing (empty if none is)."""
    command = [sys.executable, "-m", "qla_jit.demo.peers", name, *shapes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        out, reason = done.stdout, ""
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            reason = f"failed: {last[:160]}"
    except subprocess.TimeoutExpired as error:
        out, reason = error.stdout or b"", f"not done after {timeout_s:.0f} s"
        out = out.decode(errors="replace") if isinstance(out, bytes) else out
    return [Row(**json.loads(line.removeprefix(MARK))) for line in out.splitlines() if line.startswith(MARK)], reason


def main(arguments: Sequence[str]) -> None:
    name, *shapes = arguments
    for shape in shapes:
        print(MARK + json.dumps(asdict(measure(shape, "cuda", PEERS[name]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
