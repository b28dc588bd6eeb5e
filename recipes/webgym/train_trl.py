"""WebGym on TRL: clone the steps of successful trajectories, drawn from the last iterations.

    .venv/bin/python recipes/webgym/train_trl.py --smoke    # the whole walk, small
    .venv/bin/python recipes/webgym/train_trl.py --help

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
