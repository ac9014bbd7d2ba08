"""What a measurement depends on besides the kernel: the card and the versions of its software."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess

from ..arch import detect
from ..db.records import Environment


def version_of(package: str) -> str:
    """Installed version, or ``none``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def driver_version() -> str:
    """The NVIDIA driver as nvidia-smi reports it, or ``unknown`` (containers may hide the tool)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (subprocess.SubprocessError, OSError):
        return "unknown"
    return found[0] if found else "unknown"


def environment_of(device: int = 0) -> Environment:
    """The environment of a CUDA device; initialises CUDA, so only workers call it."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return Environment(
        gpu=properties.name,
        arch=detect(device).name,
        sm_count=properties.multi_processor_count,
        driver=driver_version(),
        cuda=str(torch.version.cuda),
        tilelang=version_of("tilelang"),
        torch=str(torch.__version__),
    )


def has_gpu() -> bool:
    """Whether PyTorch sees a card; opens no CUDA context in this process."""
    import torch

    return torch.cuda.is_available()
