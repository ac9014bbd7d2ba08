"""What ``--json`` prints: one object on stdout, with the same first keys for every verb, also where a verb fails."""

from __future__ import annotations

import json
import sys

FORMAT = "qla-tune"
VERSION = 1


def envelope(verb: str, ok: bool, **values) -> dict:
    """``format``, ``version``, ``verb``, ``ok``, then what the verb has to say (see docs/tuning.md)."""
    return {"format": FORMAT, "version": VERSION, "verb": verb, "ok": ok, **values}


def write(verb: str, ok: bool, **values) -> None:
    """Print one result to stdout."""
    json.dump(envelope(verb, ok, **values), sys.stdout, indent=1)
    print()
