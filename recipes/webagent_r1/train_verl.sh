#!/usr/bin/env bash
# WebAgent-R1 on verl, on this machine's CPU, from nothing to a report:  bash recipes/webagent_r1/train_verl.sh [--help]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../train_verl.sh" "$(dirname "${BASH_SOURCE[0]}")" "$@"
