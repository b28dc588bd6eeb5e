"""Several runs side by side: seeds of one setting together, settings against each other, as a table and a picture."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from webagent_core.report.learning_curve import moving_average, plain, smoothing_window, style
from webagent_core.report.run_directory import RunDirectory, settings_in
from webagent_core.report.summary import Summary, series, summarise

# Beside success; a panel is drawn where a run has logged it.
PANELS = (("steps", "steps an episode"), ("failed_steps", "steps of a failed episode"))
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass
class Arm:
    """The runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    runs: list[Summary]

    def shares(self, when: str) -> list[float | None]:
        """Success on held-out seeds of each run: `when` is before or after."""
        return [evaluation.success if (evaluation := getattr(run, when)) else None for run in self.runs]


def arms(runs: Iterable[RunDirectory]) -> list[Arm]:
    """Runs with equal settings but for the seed, together, in the order given.

    An arm's label is made of the settings in which the arms differ, or of recipe and preset where those do.
    """
    together: dict[str, list[RunDirectory]] = defaultdict(list)
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        values = settings_of(run)
        key = repr(sorted((name, repr(value)) for name, value in values.items() if name != "train.seed"))
        together[key].append(run)
        settings[key] = values
    kinds = {(values["type"], values["preset"]) for values in settings.values()}
    found = []
    for key, members in together.items():
        values = settings[key]
        if len(kinds) > 1:
            label = f"{values['type']}, {values['preset']}"
        else:
            label = ", ".join(differences(values, settings.values())) or f"{values['type']}, {values['preset']}"
        pairs = sorted(((settings_of(run)["train.seed"], run) for run in members), key=lambda pair: pair[0])
        found.append(Arm(label, [seed for seed, _ in pairs], [summarise(run.metrics()) for _, run in pairs]))
    return found


def settings_of(run: RunDirectory) -> dict[str, Any]:
    """Every setting of a run by its dotted name, `type`, `preset` and `profile` among them.

    Raises ValueError where the folder holds no settings."""
    config = run.config()
    if "type" not in config:
        raise ValueError(f"run = {str(run.path)!r} is not a run: a folder with config.yaml and metrics.jsonl is")
    return {".".join(path): value for path, value, _ in settings_in(config)}


def differences(values: dict[str, Any], others: Iterable[dict[str, Any]]) -> list[str]:
    """`setting=value` of every setting that is not the same in all of `others`."""
    others = list(others)
    names = dict.fromkeys(name for other in others for name in other)
    return [
        f"{name.rpartition('.')[2]}={values.get(name)}"
        for name in names
        if name != "train.seed" and any(other.get(name) != others[0].get(name) for other in others)
    ]


def comparison_rows(compared: Sequence[Arm]) -> list[tuple[str, ...]]:
    """A line an arm: label, seeds, before and after (of each seed), rise (mean, and smallest to largest)."""
    return [
        (arm.label, ", ".join(map(str, arm.seeds)), told(arm.shares("before")), told(arm.shares("after")), rise(arm))
        for arm in compared
    ]


def told(shares: Iterable[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares)


def rise(arm: Arm) -> str:
    pairs = zip(arm.shares("before"), arm.shares("after"), strict=True)
    rises = [after - before for before, after in pairs if before is not None and after is not None]
    if not rises:
        return "-"
    spread = f" ({min(rises):+.2f} to {max(rises):+.2f})" if len(rises) > 1 else ""
    return f"{np.mean(rises):+.2f}{spread}"


def plot_comparison(
    compared: Sequence[Arm], path: str | os.PathLike[str] | IO[bytes], *, dark: bool = False, dpi: int = 110
) -> None:
    """Write a PNG: a colour an arm, a thin line a seed, a thick one their mean, diamonds held-out seeds."""
    with matplotlib.rc_context(style(dark)):
        panels = [("success", "success (% of valid episodes)")]
        runs = [run for arm in compared for run in arm.runs]
        panels += [(key, title) for key, title in PANELS if any(series(run.train, key)[0] for run in runs)]
        figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        for at, (key, title) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), at + 1)
            for arm, colour in zip(compared, COLOURS * (1 + len(compared) // len(COLOURS)), strict=False):
                _draw(axes, arm, key, colour)
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlabel("update")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if key == "success":
                axes.set_ylim(-0.03, 1.03)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
                axes.legend(loc="best", fontsize=8, framealpha=0.85)
        figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})


def _draw(axes: Axes, arm: Arm, key: str, colour: str) -> None:
    curves = []
    for run in arm.runs:
        updates, values = series(run.train, key)
        if not values:
            continue
        smooth = moving_average(values, smoothing_window(len(values)))
        axes.plot(updates, smooth, color=colour, lw=0.8, alpha=0.5)
        curves.append(dict(zip(updates, smooth, strict=True)))
        if key == "success":
            for evaluation, x in ((run.before, 0), (run.after, run.updates)):
                if evaluation:
                    axes.plot([x], [evaluation.success], "D", ms=4.5, color=colour, alpha=0.8)
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    mean = [float(np.mean([curve[update] for curve in curves])) for update in shared]
    seeds = f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
    axes.plot(shared, mean, color=colour, lw=2.2, label=plain(arm.label) + seeds)
