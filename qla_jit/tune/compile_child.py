"""A compiler process: builds one artifact per request, sees no GPU, keeps TileLang imported between requests.

    ← {"problem": {…}, "schedule": {…}, "store": "<folder>" | null}
    → {"event": "result", "status": "ok", "path": …, "report": {…}, "source_sha256": …}
    or  {"event": "result", "status": "compile_error" | "compiler_missing", "reason": …}
"""

from __future__ import annotations

import hashlib

from ..config import Problem
from ..errors import CompilerMissingError, InfeasibleError
from ..schedule import Schedule
from ..spec import KernelSpec
from .child import Reply, serve

REASON_CHARACTERS = 1500


def reason_of(error: BaseException) -> str:
    """A failure as text for a trial row: message, then the end of the compiler's log."""
    log = getattr(error, "log", "").strip()
    text = f"{type(error).__name__}: {error}" + (f"\n…{log[-REASON_CHARACTERS // 2 :]}" if log else "")
    return text[:REASON_CHARACTERS]


def _handle(request: dict, reply: Reply) -> None:
    from ..artifacts import ArtifactStore
    from ..build import ensure

    spec = KernelSpec(Problem.from_dict(request["problem"]), Schedule.from_dict(request["schedule"]))
    reply.stage("compile")
    try:
        artifact = ensure(spec, ArtifactStore(request["store"]))
    except CompilerMissingError as error:
        reply.result(status="compiler_missing", reason=reason_of(error))
    except InfeasibleError as error:
        reply.result(status="infeasible", reason=reason_of(error))
    except Exception as error:  # BuildError, and whatever TileLang and TVM raise: each is this schedule's failure
        reply.result(status="compile_error", reason=reason_of(error))
    else:
        digest = hashlib.sha256(artifact.source.encode()).hexdigest()
        reply.result(status="ok", path=str(artifact.path), report=artifact.report, source_sha256=digest)


if __name__ == "__main__":
    serve(dict, _handle)
