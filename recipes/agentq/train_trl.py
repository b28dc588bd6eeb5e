"""Agent Q on TRL: tree search over real pages, pairs of its actions, DPO with stored log-probabilities as reference.

    .venv/bin/python recipes/agentq/train_trl.py --help

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
