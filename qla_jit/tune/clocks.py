"""Clocks of a card as they are, read through NVML and never changed.

The library comes with the driver.  Where it is missing, or does not tell, the answer is None: a trial without clocks is
still a trial.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t


@dataclass(frozen=True)
class Clocks:
    """Current clocks in MHz; None where unknown."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None


class Nvml:
    """An initialised library; OSError where it cannot be loaded, RuntimeError where it fails."""

    def __init__(self, library: str = LIBRARY):
        self._library = ctypes.CDLL(library)
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} gave {code}")

    def clocks(self, uuid: str) -> Clocks:
        """Clocks of the card with a UUID as PyTorch or the driver writes it."""
        handle = ctypes.c_void_p()
        full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._call("nvmlDeviceGetHandleByUUID", full.encode(), ctypes.byref(handle))
        return Clocks(self._clock(handle, _SM), self._clock(handle, _MEMORY))

    def _clock(self, handle: ctypes.c_void_p, which: int) -> int | None:
        value = ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetClockInfo", handle, which, ctypes.byref(value))
        except RuntimeError:
            return None
        return value.value or None


@functools.cache
def _nvml() -> Nvml | None:
    try:
        return Nvml()
    except (OSError, AttributeError, RuntimeError):
        return None


def observe(uuid: str) -> Clocks:
    """Clocks of a card now."""
    nvml = _nvml()
    if nvml is None:
        return Clocks()
    try:
        return nvml.clocks(uuid)
    except (AttributeError, RuntimeError):
        return Clocks()
