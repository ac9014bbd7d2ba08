"""Tensors as kernels take them without a view of PyTorch's: shape and dtype known ahead, the address set in every call.

A view takes 1.6 to 2 µs of host time, and a call would make six and more; an address takes 0.2 µs.  On the CPU, where
kernels are emulated or replaced, the same calls answer views.

A handle says nothing of a stream: the runtime takes that from the first tensor of torch's among a kernel's arguments,
so every launch needs one.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable

import torch

from .workspace import Layout, carve, num_bytes, offsets

_CUDA = 2  # kDLCUDA
_KINDS = {torch.int32: 0, torch.float32: 2, torch.float16: 2, torch.bfloat16: 4}  # DLDataTypeCode


class _DLTensor(ctypes.Structure):
    """DLPack's C struct, which the host code of kernels reads."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class TensorHandle:
    """A kernel's argument for contiguous tensors of one shape and dtype on one card.

    Holds no memory: whatever it was last pointed at must live until the launch.  One thread at a time.
    """

    __slots__ = ("_address", "_argument", "_tensor")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        row_major = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        int64s = ctypes.c_int64 * len(shape)
        sizes, strides = int64s(*shape), int64s(*row_major)  # the struct keeps them alive
        index = torch.cuda.current_device() if device.index is None else device.index
        self._tensor = _DLTensor(None, _CUDA, index, len(shape), _KINDS[dtype], 8 * dtype.itemsize, 1, sizes, strides)
        self._address = ctypes.c_uint64.from_buffer(self._tensor)  # its first field
        self._argument = ctypes.c_void_p(ctypes.addressof(self._tensor))

    def __call__(self, x: torch.Tensor) -> ctypes.c_void_p:
        """The argument for x, of as many elements, whatever its own shape."""
        self._address.value = x.data_ptr()
        return self._argument

    def at(self, address: int) -> ctypes.c_void_p:
        """The argument for a tensor at this address."""
        self._address.value = address
        return self._argument


def handle(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], object]:
    """What makes a kernel's argument of a contiguous tensor with as many elements as ``shape``."""
    if _has_handles(device):
        return TensorHandle(shape, dtype, device)
    return lambda x: x if x.shape == shape else x.view(shape)


class Block:
    """Tensors of a layout in one allocation per call."""

    def __init__(self, layout: Layout, device: torch.device):
        self._layout, self._device = layout, device
        self._num_bytes = num_bytes(layout)
        handles = [TensorHandle(*part, device) for part in layout] if _has_handles(device) else []
        self._handles = list(zip(handles, offsets(layout)))

    def allocate(self) -> tuple[torch.Tensor, tuple]:
        """The memory, to be kept until all launches are made, and an argument for each tensor."""
        memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        if not self._handles:
            return memory, carve(memory, self._layout)
        start = memory.data_ptr()
        return memory, tuple(handle.at(start + offset) for handle, offset in self._handles)


class PerThread(threading.local):
    """``value``: what ``make`` answers, once in each thread."""

    def __init__(self, make: Callable[[], object]):
        self.value = make()


def _has_handles(device: torch.device) -> bool:
    return device.type == "cuda"
