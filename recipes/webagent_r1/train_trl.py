"""WebAgent-R1 on TRL: multi-turn GRPO over step rows, old pages replaced by a placeholder.

    bash recipes/quickstart.sh                                  # from nothing: makes the environment, then this
    .venv/bin/python recipes/webagent_r1/train_trl.py --help    # in an environment that is there

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
