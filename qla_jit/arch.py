"""GPU architectures: what a template may use and how much of it.

Numbers are limits of the hardware per streaming multiprocessor (SM) and per block (CTA), from the CUDA programming
guide.  Nothing here asks the driver unless `detect` is called.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedError


@dataclass(frozen=True)
class Arch:
    """One target: ``name`` is ours (``sm90``), ``target`` is nvcc's (``sm_90a``)."""

    name: str
    target: str
    capability: tuple[int, int]
    smem_bytes_per_cta: int
    smem_bytes_per_sm: int
    has_wgmma: bool
    registers_per_sm: int = 65536
    max_threads_per_cta: int = 1024
    max_barriers: int = 16  # named barriers (bar.sync ids) of a CTA

    def __str__(self) -> str:
        return self.name


_KB = 1024
ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm90", "sm_90a", (9, 0), 227 * _KB, 228 * _KB, has_wgmma=True),
        Arch("sm100", "sm_100a", (10, 0), 227 * _KB, 228 * _KB, has_wgmma=False),
        Arch("sm103", "sm_103a", (10, 3), 227 * _KB, 228 * _KB, has_wgmma=False),
        Arch("sm120", "sm_120a", (12, 0), 99 * _KB, 100 * _KB, has_wgmma=False),
        Arch("sm121", "sm_121a", (12, 1), 99 * _KB, 100 * _KB, has_wgmma=False),
    )
}
ALL_ARCHS = tuple(ARCHS)


def get_arch(name: str | Arch) -> Arch:
    """Look an architecture up by our name (``sm90``) or nvcc's (``sm_90a``)."""
    if isinstance(name, Arch):
        return name
    for arch in ARCHS.values():
        if name in (arch.name, arch.target):
            return arch
    raise UnsupportedError(
        f"`arch in {tuple(ARCHS)}` must hold, but got arch={name!r}; name one of them, or run on a card of that family."
    )


def detect(device: int | None = None) -> Arch:
    """The architecture of a CUDA device (the current one by default); initialises CUDA."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("`torch.cuda.is_available()` must hold to detect the arch; name it: arch='sm90'.")
    capability = torch.cuda.get_device_capability(device)
    for arch in ARCHS.values():
        if arch.capability == capability:
            return arch
    raise UnsupportedError(
        f"a compute capability of {[a.capability for a in ARCHS.values()]} must be present, but the card has "
        f"{capability}; use CPU tensors, or FLA's Triton kernels on this card."
    )
