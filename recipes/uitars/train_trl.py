"""UI-TARS on TRL: DPO on the steps where attempts went wrong, each against its correction.

    .venv/bin/python recipes/uitars/train_trl.py --help

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
