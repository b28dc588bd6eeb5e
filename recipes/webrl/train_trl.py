"""WebRL on TRL: log-ratios regressed to a critic's advantages, phases of new tasks, replay by perplexity.

    .venv/bin/python recipes/webrl/train_trl.py --smoke    # the whole walk, small
    .venv/bin/python recipes/webrl/train_trl.py --help

The settings are in recipe.yaml beside this file; a copy of the folder trains with the copy's.
"""

from pathlib import Path

from trl_webagent.command_line import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
