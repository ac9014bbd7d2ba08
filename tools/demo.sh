#!/usr/bin/env bash
# Everything once: set-up, then sweep, kernels, a Qwen3.5 layer, and a picture.  Options go to `python -m qla_jit.demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_env.sh
qla_setup tune
exec "$QLA_PY" -m qla_jit.demo "$@"
