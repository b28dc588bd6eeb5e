"""What a run says while it goes: a progress bar for what takes long, one line for each thing done."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import transformers
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback


class Console:
    """Bars on a terminal; in a log file only the lines."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self._rich.print(line, markup=False)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Progress]:
        """A bar with one task, number 0: `bar.advance(0)`. `bar.add_task` puts another beneath it."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True, disable=not self._rich.is_terminal) as bar:
            bar.add_task(what, total=total)
            yield bar


class StepBar(TrainerCallback):
    """Moves a bar with the optimizer steps of a trainer."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(0, completed=state.global_step)


def quiet(trainer: Any) -> None:
    """Take away the callbacks that print every log line: the run says what there is to say, once."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)


def be_quiet() -> None:
    """Leave the console to the run's own lines: no banners, no bars for every file and map."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()  # here, as transformers has read its variable by now
    for name, value in {
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
