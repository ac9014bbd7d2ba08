"""The package as users get it: sdist → wheel → an installation outside the tree, and the editable mapping.

Builds run on a copy of the tree, so that no build folder is left in it, without build isolation and without an index.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from qla_jit import registry

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in")
FOLDERS = ("qla_jit", "templates", "tuning_db", "tests", "tools", "docs")
RECORDING = "sweeps/added_by_the_test.jsonl"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (copy / "tuning_db" / RECORDING).parent.mkdir(exist_ok=True)
    (copy / "tuning_db" / RECORDING).write_text('{"kind":"header"}\n')
    return copy


def build(tree: Path, out: Path, hook: str) -> Path:
    """Run one hook of the build backend, as pip and `build` do."""
    code = f"import sys, setuptools.build_meta as b; print(b.{hook}(sys.argv[1]))"
    name = run(sys.executable, "-c", code, out, cwd=tree).splitlines()[-1]
    return out / name


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    return build(tree, tmp_path_factory.mktemp("sdist"), "build_sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the unpacked sdist: what the sdist lacks, the wheel lacks too."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)
    return build(next(folder.iterdir()), tmp_path_factory.mktemp("wheel"), "build_wheel")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel alone in a folder; its dependencies come from this environment, qla_jit must not."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel)
    run(*pip, cwd=folder)
    return folder


def run_installed(folder: Path, *command: str | Path, **env: str) -> str:
    """Python with the wheel before everything else; the environment's own editable qla_jit comes last, by a hook."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run(sys.executable, *command, cwd=folder.parent, PYTHONPATH=os.pathsep.join(paths), **env)


MODULES = ("qla_jit", "qla_jit.templates", "qla_jit.tuning_db", "qla_jit.tune", "qla_jit.demo")


@pytest.mark.parametrize("module", MODULES)
def test_wheel_is_imported_from_outside_the_tree(installed, module):
    found = run_installed(installed, "-c", f"import {module} as m, os; print(os.path.realpath(m.__file__))")
    assert installed.resolve() in Path(found.strip()).parents


def test_every_module_of_the_tree_is_in_the_wheel(wheel):
    mapped = {"templates": "qla_jit/templates", "tuning_db": "qla_jit/tuning_db", "qla_jit": "qla_jit"}
    wanted = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in mapped.items()
        for path in (ROOT / source).rglob("*.py")
    }
    assert len(wanted) > 40
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_every_tuning_file_of_the_tree_is_in_the_wheel(wheel, tree):
    wanted = {
        f"qla_jit/tuning_db/{path.relative_to(tree / 'tuning_db').as_posix()}"
        for path in (tree / "tuning_db").rglob("*")
        if path.suffix in (".jsonl", ".sqlite")
    }
    assert f"qla_jit/tuning_db/{RECORDING}" in wanted
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_nothing_but_the_package(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qla_jit"}


def test_wheel_carries_licence_and_script(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    scripts = next(name for name in names if name.endswith("entry_points.txt"))
    assert "qla-tune = qla_jit.cli:main" in archive.read(scripts).decode()


def test_sdist_carries_tests_tools_and_notes(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "tests/conftest.py", "tests/packaging/test_wheel.py", "tools/test.sh", "LICENSE"} <= names


def test_installed_templates_are_found_with_their_digests(installed):
    code = "from qla_jit import registry; print(*[registry.digest(name) for name in registry.templates()], sep='\\n')"
    digests = run_installed(installed, "-c", code).split()
    assert len(digests) >= 3
    assert digests == [registry.digest(name) for name in registry.templates()]


def test_installed_recordings_are_found_by_the_demo(installed):
    code = "from qla_jit.demo.stages import recordings; print(*recordings())"
    assert RECORDING in run_installed(installed, "-c", code)


def test_installed_script_shows_its_help(installed):
    said = run_installed(installed, installed / "bin" / "qla-tune", "--help", COLUMNS="120")
    assert "run" in said and "export" in said


def test_editable_installation_maps_templates_and_tuning_db(tree, tmp_path):
    """The mapping must follow the tree, also for files added later."""
    wheel = build(tree, tmp_path, "build_editable")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tree / "templates" / "added_later.py").write_text("ANSWER = 42\n")
    code = (
        f"import os, site; site.addsitedir({str(site)!r})\n"
        "import qla_jit.templates.added_later as m, qla_jit.tuning_db as d\n"
        "print(m.ANSWER, os.path.realpath(m.__file__), os.path.realpath(d.__file__))"
    )
    # -E -S: without this environment's own editable installation, whose import hook has the same name.
    answer, template, data = run(sys.executable, "-E", "-S", "-c", code, cwd=tmp_path).split()
    assert answer == "42"
    assert tree.resolve() in Path(template).parents
    assert tree.resolve() in Path(data).parents
