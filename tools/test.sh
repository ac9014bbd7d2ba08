#!/usr/bin/env bash
# Set-up, then the tests: all that need no GPU in two processes, and those marked `gpu` one by one where a card is.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_env.sh
qla_setup dev
if qla_has_gpu; then
    status=0
    "$QLA_PY" -m pytest -q -n 2 --dist worksteal -m "not gpu" "$@" || status=$?
    "$QLA_PY" -m pytest -q -m gpu "$@" || status=$?
    exit "$status"
fi
exec "$QLA_PY" -m pytest -q -n 2 --dist worksteal "$@"
