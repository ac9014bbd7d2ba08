"""Build tuning_db/<arch>.sqlite from the reviewed tuning_db/<arch>.jsonl; equal text gives equal bytes.

    python tools/build_db.py [--check] [ARCH ...]

--check builds into a temporary folder and fails when the file in the tree differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sqlite3
import sys
import tempfile
from pathlib import Path

from qla_jit.db import Store, jsonl
from qla_jit.db.layers import SOURCE_DIGEST
from qla_jit.errors import DatabaseError

FOLDER = Path(__file__).resolve().parent.parent / "tuning_db"
# SQLite stores there which of its releases wrote the file: the only bytes that differ between hosts.
VERSION_OFFSET = 96
VERSION = (3037000).to_bytes(4, "big")  # the first release with STRICT tables


def build(source: Path, target: Path) -> None:
    """Write target from source and publish it by one rename."""
    text = source.read_bytes()
    records = jsonl.loads(text.decode(), str(source))
    if records.left_out:
        raise DatabaseError(
            f"shipped rows must be of kernels that this version has, but {source} has rows of "
            f"{dict(records.left_out)}; remove them."
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft, packed = Path(folder, "draft.sqlite"), Path(folder, "packed.sqlite")
        with Store(draft) as store:
            store.put_meta(SOURCE_DIGEST, hashlib.sha256(text).hexdigest())
            store.add(records.environments.values(), records.trials, records.best, records.fits)
        connection = sqlite3.connect(draft, isolation_level=None)
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("VACUUM INTO ?", (str(packed),))
        connection.close()
        data = bytearray(packed.read_bytes())
        data[VERSION_OFFSET : VERSION_OFFSET + 4] = VERSION
        packed.write_bytes(data)
        os.replace(packed, target)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    names = options.arch or sorted(p.stem for p in options.folder.glob("*.jsonl"))
    failed = False
    for name in names:
        source, target = options.folder / f"{name}.jsonl", options.folder / f"{name}.sqlite"
        if options.check:
            with tempfile.TemporaryDirectory() as folder:
                built = Path(folder, target.name)
                build(source, built)
                same = target.is_file() and target.read_bytes() == built.read_bytes()
            failed |= not same
            print(f"{target.name}: {'up to date' if same else 'differs; run tools/build_db.py'}")
        else:
            build(source, target)
            print(f"{target} written")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
