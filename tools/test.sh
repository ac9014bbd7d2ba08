#!/usr/bin/env bash
# Set-up, then the tests: most in two processes, those that hold a time to a limit (`wall_clock`) alone after them, and
# those marked `gpu` one by one where a card is.  Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_env.sh
qla_setup dev

status=5  # of pytest, where no test was selected
tests() { # pytest's arguments; the script ends with the status of the first run that failed
    local ended=0
    "$QLA_PY" -m pytest -q "$@" || ended=$?
    [ "$ended" -ne 2 ] || exit 2 # interrupted
    if [ "$ended" -ne 5 ] && { [ "$status" -eq 0 ] || [ "$status" -eq 5 ]; }; then
        status=$ended
    fi
}

if qla_has_gpu; then
    tests -n 2 --dist worksteal -m "not gpu and not wall_clock" "$@"
    tests -m "wall_clock and not gpu" "$@"
    tests -m gpu "$@"
else
    tests -n 2 --dist worksteal -m "not wall_clock" "$@"
    tests -m wall_clock "$@"
fi
exit "$status"
