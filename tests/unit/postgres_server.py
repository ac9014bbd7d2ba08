"""A real PostgreSQL server for tests, started on a free port of this machine and stopped with them."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def missing() -> str:
    """Why no server can be started here, or nothing."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'qla-jit[postgresql]'"
    if _binaries() is None:
        return "no PostgreSQL server (initdb, postgres) on PATH or in /usr/lib/postgresql: apt-get install postgresql"
    if os.getuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return ""


def _binaries() -> Path | None:
    folders = [Path(p).parent for p in (shutil.which("initdb"),) if p]
    folders += [Path(p) for p in sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


def _user() -> str | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


class Server:
    """``url`` in SQLAlchemy's form.  `kill` ends it as a crash would; `start` brings it back with its data."""

    def __init__(self, folder: Path):
        self._data, self._bin = folder / "data", _binaries()
        self._log = folder / "log"
        self._as = {}
        if os.getuid() == 0:  # which PostgreSQL refuses
            self._as = {"user": _user(), "group": pwd.getpwnam(_user()).pw_gid, "extra_groups": []}
            shutil.chown(folder, self._as["user"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen | None = None
        command = [self._bin / "initdb", "-D", self._data, "-U", "qla", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **self._as)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://qla@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        settings = ["listen_addresses=127.0.0.1", f"unix_socket_directories={self._data}", "fsync=off"]
        command = [self._bin / "postgres", "-D", self._data, "-p", str(self._port)]
        command += [part for setting in settings for part in ("-c", setting)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._data.parent, **self._as)
        until = time.monotonic() + 30
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """End the server and its connections at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # immediate shutdown: no goodbye to anybody
            self._process.wait(30)
            self._process = None


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A fresh server."""
    with tempfile.TemporaryDirectory(prefix="qla-postgres-") as folder:
        os.chmod(folder, 0o755)
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
