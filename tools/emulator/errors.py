"""What the emulator raises."""


class EmulationError(RuntimeError):
    """A kernel that cannot be emulated, or did what no kernel may: the message says which thread did what."""
