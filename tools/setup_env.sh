# Sourced by demo.sh and test.sh: finds or makes a Python environment with qla_jit and one of its extras.
#
#     . tools/setup_env.sh; qla_setup tune     # sets QLA_PY to the interpreter to use
#
# In this order: $QLA_PYTHON, the active virtual environment, else .venv here (made from the first Python >= 3.11 found).
# What is already importable is not installed again, so a prepared environment needs no network.

qla_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

qla_say() { printf '[setup] %s\n' "$*" >&2; }
qla_fail() { qla_say "$*"; exit 1; }

qla_has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

# Importable modules of an extra; find_spec only, because importing torch costs a second.
qla_has_modules() { # python module...
    (cd / && "$1" - "${@:2}" <<'PY'
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))
PY
    ) >/dev/null 2>&1
}

qla_has_torch() { # python
    (cd / && "$1" - <<'PY'
import importlib.metadata, sys
major, minor = map(int, importlib.metadata.version("torch").split(".")[:2])
sys.exit(not (2, 8) <= (major, minor) < (3, 0))
PY
    ) >/dev/null 2>&1
}

# The package itself, and from this tree: another checkout's would be run instead of what is here.
qla_has_package() { # python
    [ "$(cd / && "$1" -c 'import os, qla_jit, qla_jit.templates; print(os.path.realpath(qla_jit.__path__[0]))' 2>/dev/null)" \
        = "$(cd "$qla_root" && pwd -P)/qla_jit" ]
}

qla_find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    return 1
}

qla_make_venv() { # folder
    local python options=
    python=$(qla_find_python) || qla_fail "Python >= 3.11 must be on PATH, but none is; install it, or set QLA_PYTHON."
    if qla_has_torch "$python"; then
        options=--system-site-packages
    fi
    qla_say "creating $1 with $("$python" --version)${options:+ (it has torch, which is kept)}"
    rm -rf "$1"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv $options "$1" || qla_fail "python -m venv failed; set QLA_PYTHON to an environment of yours."
    else # Debian and Ubuntu ship ensurepip apart
        "$python" -m venv --without-pip $options "$1" && "$python" -m pip -q --python "$1/bin/python" install pip ||
            qla_fail "the venv module lacks pip; run: apt-get install python3-venv, or set QLA_PYTHON."
    fi
}

qla_install() { # python extra
    local began=$SECONDS
    if ! qla_has_torch "$1"; then
        # Without a card the tested release is named: a plain range takes the newest build, several GB of CUDA libraries.
        # A CPU build of that release, where pip's configured indexes have one, satisfies the same pin.
        local torch='torch>=2.8,<3'
        qla_has_gpu || torch='torch==2.13.0'
        qla_say "installing $torch (minutes, once)"
        "$1" -m pip install -q "$torch" || qla_fail "torch could not be installed; install it yourself, then run this again."
    fi
    qla_say "installing qla-jit[$2] and what it needs"
    (cd "$qla_root" && "$1" -m pip install -q -e ".[$2]") || qla_fail "pip could not install qla-jit[$2]; see above."
    qla_say "installed in $((SECONDS - began)) s"
}

qla_setup() { # extra
    local modules=(torch tilelang sqlite_utils platformdirs optuna typer rich matplotlib) stamp=
    if [ "$1" = dev ]; then
        modules+=(pytest xdist setuptools)
    fi
    if [ -n "${QLA_PYTHON:-}" ]; then
        QLA_PY=$(command -v "$QLA_PYTHON") || qla_fail "QLA_PYTHON must name an interpreter, but got $QLA_PYTHON."
    elif [ -n "${VIRTUAL_ENV:-}" ]; then
        QLA_PY=$VIRTUAL_ENV/bin/python
    else
        QLA_PY=$qla_root/.venv/bin/python stamp=$qla_root/.venv/.qla-$1
        "$QLA_PY" -c '' 2>/dev/null || qla_make_venv "$qla_root/.venv"
    fi
    # In the environment made here, changed requirements are installed again.
    if [ -n "$stamp" ] && [ ! "$stamp" -nt "$qla_root/pyproject.toml" ] || ! qla_has_modules "$QLA_PY" "${modules[@]}"; then
        qla_install "$QLA_PY" "$1"
    elif ! qla_has_package "$QLA_PY"; then
        qla_say "linking qla-jit into $QLA_PY"
        (cd "$qla_root" && "$QLA_PY" -m pip install -q --no-deps --no-build-isolation -e .) || qla_install "$QLA_PY" "$1"
    fi
    [ -z "$stamp" ] || touch "$stamp"
    export QLA_PY
}
