#!/usr/bin/env bash
# Sets up and runs the tests:  bash tests/run.sh [--smoke | --all] [pytest arguments]
# --smoke: also every recipe's script, small.  --all: also those and whatever else is slow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

select=(-m "not slow and not smoke")
args=()
for arg in "$@"; do
    case "$arg" in
        --smoke) select=(-m "not slow") ;;
        --all) select=() ;;
        *) args+=("$arg") ;;
    esac
done

# verl does not run on Python 3.13 yet; without it the tests of verl_webagent are left out.
python=.venv/bin/python
[ -x "$python" ] || python=python3
extras=(trl judge smollm2 sites webarena dev)
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' 2>/dev/null; then extras+=(verl); fi
bash recipes/setup.sh "${extras[@]}"
# One thread: models this small are slower on several, and sums come out in the same order everywhere. Nothing in the
# tests may need a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
exec .venv/bin/python -m pytest -n 2 --dist loadfile --durations=10 ${select[@]+"${select[@]}"} ${args[@]+"${args[@]}"}
