#!/usr/bin/env bash
# AsyncWebRL on verl, on this machine's CPU, from nothing to a report:  bash recipes/asyncwebrl/train_verl.sh [--help]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../train_verl.sh" "$(dirname "${BASH_SOURCE[0]}")" "$@"
