#!/usr/bin/env bash
# Trains WebAgent-R1 on MiniWoB++ pages on this machine's CPU, from nothing to a report:  bash recipes/quickstart.sh
# Arguments are handed to the training script: bash recipes/quickstart.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash recipes/setup.sh trl
export HF_HUB_DISABLE_TELEMETRY=1  # the libraries underneath report to their makers otherwise
exec .venv/bin/python recipes/webagent_r1/train_trl.py --profile embedded "$@"
