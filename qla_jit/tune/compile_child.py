"""A compiler process: builds one artifact per request, sees no GPU, keeps TileLang imported between requests.

    ← {"problem": {…}, "schedule": {…}, "store": "<folder>" | null}
    → {"event": "result", "status": "ok", "path": …, "report": {…}, "source_sha256": …}
    or  {"event": "result", "status": "compile_error" | "compiler_missing" | "host_error", "reason": …}

``host_error`` is what this machine does to every schedule: a full disk, a folder that cannot be written.
"""

from __future__ import annotations

import errno
import hashlib
import os

from ..config import Problem
from ..errors import CacheError, CompilerMissingError, InfeasibleError
from ..schedule import Schedule
from ..spec import KernelSpec
from .child import Reply, serve

REASON_CHARACTERS = 1500
HOST_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def reason_of(error: BaseException) -> str:
    """A failure as text for a trial row: message, then the end of the compiler's log."""
    log = getattr(error, "log", "").strip()
    text = f"{type(error).__name__}: {error}" + (f"\n…{log[-REASON_CHARACTERS // 2 :]}" if log else "")
    return text[:REASON_CHARACTERS]


def _is_of_the_host(error: BaseException) -> bool:
    texts = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), os.strerror(errno.EROFS)
    said = f"{error}\n{getattr(error, 'log', '')}"
    return getattr(error, "errno", None) in HOST_ERRNOS or any(text in said for text in texts)


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
    except CacheError as error:
        reply.result(status="host_error", reason=reason_of(error))
    except Exception as error:  # BuildError, and whatever TileLang and TVM raise: each is this schedule's failure
        status = "host_error" if _is_of_the_host(error) else "compile_error"
        reply.result(status=status, reason=reason_of(error))
    else:
        digest = hashlib.sha256(artifact.source.encode()).hexdigest()
        reply.result(status="ok", path=str(artifact.path), report=artifact.report, source_sha256=digest)


if __name__ == "__main__":
    serve(dict, _handle)
