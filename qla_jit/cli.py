"""Entry point of ``qla-tune``.

Options without a verb mean ``run``: ``qla-tune --arch sm90 --heads 16:64 --budget 120``.  Errors of this package end
the program with their message and exit code 2; a missing extra is named with the command that installs it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping

from .errors import QlaError

NEEDED = ("typer", "rich", "optuna", "matplotlib")
#: Options that belong to the program itself, not to ``run``.
PROGRAM_OPTIONS = ("--help", "--install-completion", "--show-completion", "--version")

#: Set by the shell functions that ``--install-completion`` installs; bash sends words, zsh and fish a line.
COMPLETING, ARGUMENTS = "_QLA_TUNE_COMPLETE", "_TYPER_COMPLETE_ARGS"


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
    if COMPLETING in os.environ:
        _complete_options_of_run(os.environ)
    try:
        app(arguments, prog_name="qla-tune")
    except QlaError as error:
        if "--json" in arguments:
            from .tune import json_output

            name = {"type": type(error).__name__, "message": str(error)}
            json_output.write(arguments[0], False, error=name)
        _fail(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _complete_options_of_run(environment: MutableMapping[str, str]) -> None:
    """A shell completes ``qla-tune --he`` as the options of ``run``: put the verb into the words that it sent."""
    bash = environment[COMPLETING].endswith("bash")
    name = "COMP_WORDS" if bash else ARGUMENTS
    words = environment.get(name, "")
    first = words.split()[1:2]
    if not first or not first[0].startswith("-") or first[0] in PROGRAM_OPTIONS:
        return
    program, _, rest = words.partition(first[0])
    environment[name] = f"{program}run {first[0]}{rest}"
    if bash:
        environment["COMP_CWORD"] = str(int(environment["COMP_CWORD"]) + 1)


def _fail(message: str) -> None:
    print(f"qla-tune: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
