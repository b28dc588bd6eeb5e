"""HiconAgent on TRL: GRPO over answers to single recorded steps, with a branch that sees a compressed history.

    bash recipes/setup.sh                                       # makes the environment
    .venv/bin/python recipes/hiconagent/train_trl.py --help

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
