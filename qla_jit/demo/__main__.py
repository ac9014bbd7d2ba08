"""Command line of the demo: python -m qla_jit.demo [--out DIR] [--budget SECONDS] [--recording FILE]."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cli import NEEDED
from ..errors import QlaError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qla_jit.demo",
        description="Tune a Qwen3.5 layer, compile its kernels, run it, and draw the sweep; on recorded trials and CPU "
        "tensors where there is no GPU.",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds that the sweep may take (default: 75)")
    parser.add_argument("--recording", type=Path, help="sweep to replay without a GPU (default: a shipped one)")
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(2, f"the demo needs {', '.join(missing)}, not installed here; run: pip install 'qla-jit[tune]'\n")
    from rich.console import Console

    from .stages import run

    try:
        run(options.out, options.budget, options.recording, Console())
    except QlaError as error:
        parser.exit(2, f"qla_jit.demo: {type(error).__name__}: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
