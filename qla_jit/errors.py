"""Every error this package raises on purpose.

A message states the invariant, the values that broke it, and the remedy.  Errors that report bad arguments also
derive from ``ValueError`` (or ``TypeError``), so callers that know nothing of this package still catch them.
"""

from __future__ import annotations


class QlaError(Exception):
    """Base of all errors of qla_jit."""


class ConfigError(QlaError, ValueError):
    """An `OpConfig`, `Problem` or `Schedule` whose fields contradict each other."""


class InputError(QlaError, ValueError):
    """A tensor argument of the operator has the wrong shape, dtype, device, stride or content."""


class UnsupportedError(QlaError, ValueError):
    """The question is well formed, but no template answers it (head dim, dtype, arch)."""


class GradientError(QlaError, RuntimeError):
    """A gradient was asked for where no backward kernel exists."""


class InfeasibleError(QlaError, ValueError):
    """A schedule breaks a rule or a limit of the card; ``violations`` names each."""

    def __init__(self, message: str, violations: tuple = ()):
        super().__init__(message)
        self.violations = violations


class BuildError(QlaError, RuntimeError):
    """Lowering or nvcc failed; ``log`` holds what the compiler said."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class CompilerMissingError(BuildError):
    """No nvcc (or no TileLang) on this machine: cached kernels still run, new ones cannot be built."""


class ToolError(QlaError, RuntimeError):
    """A helper tool (cuobjdump) is missing or failed."""


class CacheError(QlaError, RuntimeError):
    """The artifact folder cannot be trusted or written."""


class KernelMissingError(QlaError, RuntimeError):
    """Strict mode: a kernel is not in the cache and compiling it now is not allowed."""


class DatabaseError(QlaError, RuntimeError):
    """A tuning database cannot be read, has a foreign schema, or refuses a row."""


class OlderSchemaError(DatabaseError):
    """A tuning database of an older version that may not be written, so not migrated either."""


class ReplayMissError(QlaError, LookupError):
    """A recorded sweep was asked for a point that nobody measured."""
