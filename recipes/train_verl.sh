#!/usr/bin/env bash
# Runs a recipe on verl, on this machine:  bash recipes/train_verl.sh RECIPE_FOLDER [arguments]
# What each recipe's train_verl.sh calls. Arguments are handed on: --help, --seed N, --smoke, --resume, KEY=VALUE of verl.
set -euo pipefail
folder=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash recipes/setup.sh trl verl  # trl for the warm-up
export HF_HUB_DISABLE_TELEMETRY=1 RAY_USAGE_STATS_ENABLED=0  # the libraries underneath report to their makers otherwise
exec .venv/bin/python -m verl_webagent.train "$folder" "$@"
