"""Runs generated CUDA kernels on the CPU, thread by thread: see README.md."""

from .errors import EmulationError
from .program import Argument, Program, TensorMap
from .run import emulate, kernel

__all__ = ["Argument", "EmulationError", "Program", "TensorMap", "emulate", "kernel"]
