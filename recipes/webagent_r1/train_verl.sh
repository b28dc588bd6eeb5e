#!/usr/bin/env bash
# WebAgent-R1 on verl, on this machine's CPU, from nothing to a report:  bash recipes/webagent_r1/train_verl.sh
# Arguments are handed on: --help, --seed N, --smoke, --resume, and overrides of verl's configuration.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$folder/../.."

bash recipes/setup.sh trl verl  # trl for the warm-up
exec .venv/bin/python -m verl_webagent.train "$folder" "$@"
