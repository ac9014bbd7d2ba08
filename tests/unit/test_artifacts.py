"""The artifact store: whole entries or misses, one winner among many writers, and no folder that others can write."""

import fcntl
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from qla_jit import artifacts, toolchain
from qla_jit.artifacts import CUBIN, LIBRARY, MANIFEST, SOURCE, ArtifactStore, build_digest
from qla_jit.config import OpConfig
from qla_jit.errors import CacheError
from qla_jit.registry import get_template
from qla_jit.spec import KernelSpec, canonical_json

FLAGS = ("-O3",)
FILES = {LIBRARY: b"\x7fELF library", SOURCE: b"// source", CUBIN: b"\x7fELF cubin"}
TOOLS = toolchain.Toolchain(tilelang="0.1.15", nvcc="13.0.88", nvcc_path="/nowhere/nvcc")
NOBODY = 65534


def spec(heads=8) -> KernelSpec:
    problem = OpConfig(1, heads).problem("kkt_inverse")
    return KernelSpec(problem, get_template("kkt_inverse_mma").default(problem))


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: TOOLS)


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "cache")


def publish(store, spec_=None, files=FILES, flags=FLAGS):
    return store.publish(spec_ or spec(), flags, dict(files), {"registers": 40})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def entries(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.glob("*/*"))


def test_published_artifact_is_found_with_its_bytes_and_report(store):
    assert store.get(spec(), FLAGS) is None
    made = publish(store)
    found = store.get(spec(), FLAGS)
    assert found == made
    assert found.library.read_bytes() == FILES[LIBRARY]
    assert (found.source, found.cubin) == ("// source", FILES[CUBIN])
    assert found.report["registers"] == 40
    assert found.report["toolchain"] == {"tilelang": "0.1.15", "nvcc": "13.0.88"}
    assert sorted(p.name for p in store.root.iterdir()) == [spec().digest]  # no staging left


TEXT, TARGET = "// source", "sm_90a"


def remembered(store):
    made = publish(store)
    store.remember_text(TEXT, TARGET, FLAGS, made)
    return made


def test_device_code_is_found_by_text_target_flags_and_tools(store, monkeypatch):
    assert store.device_code(TEXT, TARGET, FLAGS) is None
    made = remembered(store)
    found = store.device_code(TEXT, TARGET, FLAGS)
    assert (found.cubin, found.report, store.root / found.build) == (FILES[CUBIN], made.report, made.path)
    others = [("// other", TARGET, FLAGS), (TEXT, "sm_100a", FLAGS), (TEXT, TARGET, ("-O2",))]
    assert [store.device_code(*other) for other in others] == [None] * 3
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, nvcc="13.1.0"))
    assert store.device_code(TEXT, TARGET, FLAGS) is None


def test_device_code_of_a_damaged_foreign_or_removed_build_is_a_miss_until_it_is_built_again(store, tmp_path):
    made = remembered(store)
    made.library.write_bytes(b"edited")
    assert store.device_code(TEXT, TARGET, FLAGS) is None
    shutil.rmtree(made.path)
    assert store.device_code(TEXT, TARGET, FLAGS) is None
    remembered(store)
    assert store.device_code(TEXT, TARGET, FLAGS).cubin == FILES[CUBIN]
    (link,) = (store.root / artifacts.TEXTS).iterdir()
    link.unlink()
    shutil.copytree(store.root / spec().digest, tmp_path / spec().digest)
    link.symlink_to(tmp_path / spec().digest / made.path.name)  # whole, but not of this cache
    assert store.device_code(TEXT, TARGET, FLAGS) is None


def test_text_of_another_build_is_a_miss_though_its_link_says_so(store):
    made = publish(store, files={**FILES, SOURCE: b"// other"})
    store.remember_text(TEXT, TARGET, FLAGS, made)
    assert store.device_code(TEXT, TARGET, FLAGS) is None


@pytest.mark.parametrize("changed", [{"nvcc": "13.1.0"}, {"tilelang": "0.1.16"}])
def test_another_toolchain_is_a_miss(store, monkeypatch, changed):
    publish(store)
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, **changed))
    assert store.get(spec(), FLAGS) is None


def test_another_problem_or_flag_is_a_miss(store):
    publish(store)
    assert store.get(spec(16), FLAGS) is None
    assert store.get(spec(), ("-O2",)) is None


@pytest.mark.parametrize("name", [LIBRARY, SOURCE, CUBIN, MANIFEST])
def test_truncated_file_is_a_miss(store, name):
    path = publish(store).path / name
    path.write_bytes(path.read_bytes()[:-3])
    assert store.get(spec(), FLAGS) is None


@pytest.mark.parametrize("name", [LIBRARY, CUBIN, MANIFEST])
def test_missing_file_is_a_miss(store, name):
    (publish(store).path / name).unlink()
    assert store.get(spec(), FLAGS) is None


def test_edited_library_is_a_miss_and_gets_replaced(store):
    made = publish(store)
    made.library.write_bytes(b"\x7fELF another")
    assert store.get(spec(), FLAGS) is None
    assert publish(store).library.read_bytes() == FILES[LIBRARY]
    assert [p.name for p in store.root.iterdir()] == [spec().digest]


@pytest.mark.parametrize(
    "manifest",
    ["[]", "{}", "null", '"text"', '{"sha256": [], "spec": {}, "report": {}}', '{"sha256": {"kernel.so": 1}}', "\xff"],
)
def test_foreign_manifest_is_a_miss(store, manifest):
    (publish(store).path / MANIFEST).write_bytes(manifest.encode("latin-1"))
    assert store.get(spec(), FLAGS) is None


@pytest.mark.parametrize("change", ["spec", "flags", "toolchain", "sha256", "report"])
def test_manifest_that_does_not_belong_there_is_a_miss(store, change):
    path = publish(store).path / MANIFEST
    manifest = json.loads(path.read_text())
    if change == "spec":
        manifest["spec"]["problem"]["num_value_heads"] = 16
    elif change == "flags":
        manifest["report"]["flags"] = ["-O0"]
    elif change == "toolchain":
        manifest["report"]["toolchain"]["nvcc"] = "12.0.0"
    elif change == "sha256":
        del manifest["sha256"][LIBRARY]
    else:
        del manifest["report"]
    path.write_text(canonical_json(manifest))
    assert store.get(spec(), FLAGS) is None


def test_entry_copied_to_another_specs_folder_is_a_miss(store):
    made = publish(store)
    target = store.root / spec(16).digest / build_digest(spec(16), FLAGS, TOOLS)
    shutil.copytree(made.path, target)
    assert store.get(spec(16), FLAGS) is None


def test_file_where_an_entry_should_be_is_replaced(store):
    target = store.root / spec().digest / build_digest(spec(), FLAGS, TOOLS)
    store.prepare()
    target.parent.mkdir()
    target.write_text("not a folder")
    assert store.get(spec(), FLAGS) is None
    assert publish(store).library.read_bytes() == FILES[LIBRARY]


def test_valid_entry_is_kept_when_published_again(store):
    first = publish(store)
    inode = first.library.stat().st_ino
    again = store.publish(spec(), FLAGS, {**FILES, LIBRARY: b"a later build"}, {})
    assert again.library.stat().st_ino == inode
    assert [p.name for p in store.root.iterdir()] == [spec().digest]


def test_staging_of_killed_process_is_removed_later_and_a_fresh_one_is_not(store):
    store.prepare()
    for prefix in (artifacts.STAGING, artifacts.BROKEN):
        for age in ("old", "new"):
            folder = store.root / f"{prefix}{age}"
            folder.mkdir()
            (folder / LIBRARY).write_bytes(b"half")
            if age == "old":
                os.utime(folder, (0, 0))
    publish(store)
    left = {p.name for p in store.root.iterdir()} - {spec().digest}
    assert left == {artifacts.STAGING + "new", artifacts.BROKEN + "new"}


def _publish_many(root, barrier, answers):
    toolchain.current = lambda: TOOLS
    store = ArtifactStore(root)
    barrier.wait()
    for _ in range(20):
        made = publish(store)
        answers.put((str(made.path), made.library.read_bytes()))
    answers.put("done")


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_many_processes_publish_one_valid_entry_and_leave_nothing(tmp_path, start_method):
    context = multiprocessing.get_context(start_method)
    workers = 6 if start_method == "fork" else 2
    barrier, answers = context.Barrier(workers), context.SimpleQueue()
    arguments = (tmp_path / "cache", barrier, answers)
    processes = [context.Process(target=_publish_many, args=arguments) for _ in range(workers)]
    for process in processes:
        process.start()
    got, done = set(), 0
    while done < workers:
        answer = answers.get()
        done += answer == "done"
        got.add(answer)
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0] * workers
    store = ArtifactStore(tmp_path / "cache")
    assert got - {"done"} == {(str(store.get(spec(), FLAGS).path), FILES[LIBRARY])}
    assert entries(store.root) == [f"{spec().digest}/{build_digest(spec(), FLAGS, TOOLS)}"]
    assert [p.name for p in store.root.iterdir()] == [spec().digest]


def test_writers_that_meet_a_broken_entry_never_lose_a_good_one(store):
    """Threads replace the same broken entry; from the first publish on, every read must hit."""
    publish(store).library.write_bytes(b"edited")
    published, misses = threading.Event(), []

    def write():
        publish(store)
        published.set()

    def read():
        published.wait(10)
        misses.extend(1 for _ in range(200) if store.get(spec(), FLAGS) is None)

    threads = [threading.Thread(target=write) for _ in range(8)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not misses
    assert [p.name for p in store.root.iterdir()] == [spec().digest]


def test_who_replaces_a_broken_entry_waits_for_who_is_at_it_and_keeps_their_good_one(store):
    made = publish(store)
    made.library.write_bytes(b"edited")
    folder = os.open(store.root, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    writer = threading.Thread(target=publish, args=(store,))
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    made.library.write_bytes(FILES[LIBRARY])
    inode = made.library.stat().st_ino
    os.close(folder)
    writer.join(60)
    assert not writer.is_alive()
    assert store.get(spec(), FLAGS).library.stat().st_ino == inode


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_root_that_others_can_write_is_refused(store, bits):
    publish(store)
    store.root.chmod(0o700 | bits)
    with pytest.raises(CacheError, match=r"belong to you alone.*chmod -R go-w"):
        store.get(spec(), FLAGS)
    with pytest.raises(CacheError, match="belong to you alone"):
        publish(store)
    with pytest.raises(CacheError, match="belong to you alone"):
        store.prepare()


def test_root_of_another_user_is_refused(store, monkeypatch):
    publish(store)
    owner = store.root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's folders are trusted by all: pretend it is someone else's
        os.chown(store.root, NOBODY, -1)
    with pytest.raises(CacheError, match="has owner"):
        store.get(spec(), FLAGS)


@pytest.mark.parametrize("part", ["spec folder", "entry", "library"])
def test_entry_that_others_can_write_is_a_miss_and_gets_replaced(store, part):
    made = publish(store)
    path = {"spec folder": made.path.parent, "entry": made.path, "library": made.library}[part]
    path.chmod(mode(path) | stat.S_IWOTH)
    assert store.get(spec(), FLAGS) is None
    if part != "spec folder":
        assert mode(publish(store).library) == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_everything_created_belongs_to_the_user_alone_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        store = ArtifactStore(tmp_path / "new" / "parents" / "cache")
        made = publish(store)
    finally:
        os.umask(before)
    folders = (tmp_path / "new", tmp_path / "new/parents", store.root, made.path.parent, made.path)
    assert [mode(folder) for folder in folders] == [0o700] * 5
    assert {mode(path) for path in made.path.iterdir()} == {0o600}


def test_symbolic_root_is_resolved_once(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    (tmp_path / "link").symlink_to(mine)
    store = ArtifactStore(tmp_path / "link")
    publish(store)
    other.mkdir(mode=0o777)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(other)
    assert store.root == mine and store.get(spec(), FLAGS).path.is_relative_to(mine)


def test_symbolic_root_to_a_shared_folder_is_refused(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    with pytest.raises(CacheError, match="belong to you alone"):
        ArtifactStore(tmp_path / "link").get(spec(), FLAGS)


def test_tilde_in_the_root_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QLA_CACHE_DIR", "~/kernels")
    assert ArtifactStore().root == tmp_path / "kernels"
    assert ArtifactStore("~/other").root == tmp_path / "other"


def test_without_nvcc_a_build_of_the_same_tilelang_serves(store, monkeypatch):
    made = publish(store)
    publish(store, flags=("-O2",))
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, nvcc=None))
    assert store.get(spec(), FLAGS).path == made.path  # equal flags first
    assert store.get(spec(), ("-O9",)) is not None
    assert store.get(spec(16), FLAGS) is None
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, nvcc=None, tilelang="0.1.16"))
    assert store.get(spec(), FLAGS) is None


def test_without_nvcc_broken_entries_are_passed_over(store, monkeypatch):
    publish(store).library.write_bytes(b"edited")
    publish(store, flags=("-O2",))
    (store.root / spec().digest / "zzz").mkdir()
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, nvcc=None))
    assert store.get(spec(), FLAGS).report["flags"] == ["-O2"]


READER = """
import os, sys
from qla_jit import toolchain
from test_artifacts import FLAGS, TOOLS, publish, spec
from qla_jit.artifacts import ArtifactStore
from qla_jit.errors import CacheError
spec(), spec(16).digest  # templates are imported while this is still the user who may read them
if os.getuid() == 0: os.setuid({nobody})
toolchain.current = lambda: TOOLS
store = ArtifactStore(sys.argv[1])
print(store.get(spec(), FLAGS) is not None, store.get(spec(16), FLAGS) is not None)
for act in (store.prepare, lambda: publish(store, spec(16))):
    try:
        act()
        print("written")
    except CacheError as error:
        print(error)
"""


@pytest.fixture
def read_only_root():
    """A cache that the reader may not write: root's folder when tests run as root, else one without the write bit."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = folder / "cache"
    publish(ArtifactStore(root))
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if os.getuid() != 0:
        root.chmod(0o555)
    yield root
    root.chmod(0o755)
    shutil.rmtree(folder)


def read_as_nobody(root: Path) -> list[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", READER.format(nobody=NOBODY), str(root)]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_read_only_root_serves_reads_and_refuses_writes_with_the_remedy(read_only_root):
    found, prepared, published = read_as_nobody(read_only_root)
    assert found == "True False"
    for said in (prepared, published):
        assert "must be writable" in said and "QLA_CACHE_DIR" in said


def test_corrupted_entry_in_a_read_only_root_is_a_miss(read_only_root):
    library = next(read_only_root.rglob(LIBRARY))
    library.chmod(0o644)
    library.write_bytes(b"edited")
    found, prepared, _ = read_as_nobody(read_only_root)
    assert found == "False False"
    assert "must be writable" in prepared


def test_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(store, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CacheError, match="No space left"):
        publish(store)
    assert list(store.root.iterdir()) == []
