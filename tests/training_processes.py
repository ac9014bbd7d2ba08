"""Data-parallel training of a small model in several processes, and the same in one.

Processes import this module by its name, so it is one of its own.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import train_lm  # noqa: E402

TIMEOUT_S = 120
SIZES = train_lm.Sizes(width=32, layers=1, heads=2, value_heads=4, head_dim=64, tokens=150, shortest=10, longest=90)


def model_on(device: str) -> torch.nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return train_lm.LanguageModel(SIZES, train_lm.by_operator).to(device)


def batch_of(rank: int, device: str) -> train_lm.Batch:
    return train_lm.Corpus(rank).batch(SIZES, device)


def averaged_gradients(world: int, device: str) -> dict[str, torch.Tensor]:
    """The mean over ranks of what each rank's batch gives, in this process."""
    model = model_on(device)
    for rank in range(world):
        (model(batch_of(rank, device)).mean() / world).backward()
    return {name: x.grad.cpu() for name, x in model.named_parameters()}


def run(world: int, wrapper: str, device: str, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients by name after a step in ``world`` processes.  wrapper: "ddp" or "fsdp"."""
    context = torch.multiprocessing.spawn(_rank, (world, wrapper, device, str(folder)), world, join=False)
    deadline = time.monotonic() + TIMEOUT_S
    while not context.join(max(0.0, deadline - time.monotonic())):  # true once all have ended, raises what one raised
        if time.monotonic() >= deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{wrapper} in {world} processes was not done after {TIMEOUT_S} s")
    return torch.load(folder / "gradients.pt")


def _rank(rank: int, world: int, wrapper: str, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device, backend = (f"cuda:{rank}", "nccl") if kind == "cuda" else ("cpu", "gloo")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    model = wrapped(model_on(device), wrapper, kind, world)
    model(batch_of(rank, device)).mean().backward()
    found = {name.removeprefix("module."): whole(x.grad).cpu() for name, x in model.named_parameters()}
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


def wrapped(model: torch.nn.Module, wrapper: str, kind: str, world: int) -> torch.nn.Module:
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(kind, (world,))
    for layer in model.layers:
        fully_shard(layer[1], mesh=mesh)  # the Gated DeltaNet layer: its parameters exist while it runs
    return fully_shard(model, mesh=mesh)


def whole(x: torch.Tensor) -> torch.Tensor:
    """A gradient put together from its shards; every rank must call."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
