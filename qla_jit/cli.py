"""Entry point of ``qla-tune``.

Options without a verb mean ``run``: ``qla-tune --arch sm90 --heads 16:64 --budget 120``.  Errors of this package end
the program with their message and exit code 2; a missing extra is named with the command that installs it.
"""

from __future__ import annotations

import importlib.util
import sys

from .errors import QlaError

NEEDED = ("typer", "rich", "optuna", "matplotlib")
#: Options that belong to the program itself, not to ``run``.
PROGRAM_OPTIONS = ("--help", "--install-completion", "--show-completion", "--version")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        from . import __version__

        print(f"qla-jit {__version__}")
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"qla-tune needs {', '.join(missing)}, which are not installed; run: pip install 'qla-jit[tune]'")
    from .tune.commands import app

    if arguments and arguments[0].startswith("-") and arguments[0] not in PROGRAM_OPTIONS:
        arguments.insert(0, "run")
    try:
        app(arguments, prog_name="qla-tune")
    except QlaError as error:
        _fail(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> None:
    print(f"qla-tune: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
