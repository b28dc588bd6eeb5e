"""The learning curve of a run as one picture."""

from __future__ import annotations

import math
import os
from typing import IO, Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import MaxNLocator, PercentFormatter

from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus
from webagent_core.report.run_directory import RunDirectory
from webagent_core.report.summary import Evaluation, Summary, number, percent, series, summarise
from webagent_core.report.text import printable

# Okabe and Ito's palette, safe for the colour-blind. Ends that no policy causes are hatched as well.
STATUS_COLOURS = {
    ExitStatus.ANSWERED: "#56B4E9",
    ExitStatus.STEP_LIMIT: "#E69F00",
    ExitStatus.FORMAT_ERROR: "#CC79A7",
    ExitStatus.CONTEXT_OVERFLOW: "#F0E442",
    ExitStatus.TASK_TIMEOUT: "#009E73",
    ExitStatus.ENV_ERROR: "#D55E00",
    ExitStatus.JUDGE_ERROR: "#8C510A",
    ExitStatus.CANCELLED: "#999999",
}
TRAIN, BEFORE, AFTER = "C0", "C1", "C2"  # in the order of style's colour cycle
SIDE_PANELS = (
    ("loss", "loss"),
    ("kl", "KL to the reference (nats)"),
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy (nats)"),
    ("clip_ratio", "clipped tokens (share)"),
)
TASK_PANELS, TASK_COLUMNS = 12, 6


def plot_learning_curve(
    run: RunDirectory, path: str | os.PathLike[str] | IO[bytes], *, dark: bool = False, dpi: int = 140
) -> None:
    """Write the picture as PNG to a path or a binary file.

    Above, success per update with the held-out evaluations and their 95% Wilson intervals, how the episodes of each
    update ended, and what the optimiser reports; below, one small panel per task. With more than 12 tasks, the 12 whose
    success changed the most. What a run has not logged is left out.
    """
    with matplotlib.rc_context(style(dark)):
        figure = _draw(summarise(run.metrics()), run.name)
        FigureCanvasAgg(figure)
        figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})


def _draw(summary: Summary, name: str) -> Figure:
    tasks, note = _task_choice(summary)
    task_rows = math.ceil(len(tasks) / TASK_COLUMNS)
    heights = [5.2] + ([1.65 * task_rows + 0.45] if tasks else [])
    figure = Figure(figsize=(12, sum(heights) + 0.3), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.03)
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    side = [(key, title) for key, title in SIDE_PANELS if series(summary.train, key)[0]][:4]
    counted = sum(summary.exit_statuses.values()) > 0
    top = rows[0].subgridspec(1, 2 if side else 1, width_ratios=[3, 1.15] if side else [1])
    left = top[0].subgridspec(2 if counted else 1, 1, height_ratios=[2.3, 1] if counted else [1])
    success = figure.add_subplot(left[0])
    _draw_success(success, summary)
    success.set_title(plain(name), loc="left", fontsize=12, fontweight="bold")
    if counted:
        statuses = figure.add_subplot(left[1], sharex=success)
        success.tick_params(labelbottom=False)
        _draw_statuses(statuses, summary)
    (statuses if counted else success).set_xlabel("update")
    if side:
        _draw_side(figure, top[1], summary, side)
    if tasks:
        _draw_tasks(figure, rows[1], summary, tasks, note)
    return figure


def _draw_success(axes: Axes, summary: Summary) -> None:
    updates, values = series(summary.train, "success")
    last = max(summary.updates, 1)
    if values:
        axes.plot(updates, values, "o", ms=3.5, color=TRAIN, alpha=0.45, mew=0, label="training, one update")
    if len(values) >= 5:
        width = smoothing_window(len(values))
        label = f"training, mean of {width} updates"
        axes.plot(updates, moving_average(values, width), color=TRAIN, lw=2.2, label=label)
    margin = max(1.0, 0.035 * last)
    for evaluation, word, x, colour, line in (
        (summary.before, "before", -margin / 2, BEFORE, "--"),
        (summary.after, "after", last + margin, AFTER, "-"),
    ):
        if evaluation is not None:
            _draw_evaluation(axes, evaluation, word, x, colour, line)
    if summary.during:
        shares = [evaluation.success for _, evaluation in summary.during]
        bars = [[e.success - e.low for _, e in summary.during], [e.high - e.success for _, e in summary.during]]
        known = all(evaluation.episodes for _, evaluation in summary.during)
        style = {"fmt": "D", "ms": 4, "color": AFTER, "mfc": "none", "capsize": 2, "lw": 1.2}
        label = "held-out seeds in between"
        axes.errorbar([u for u, _ in summary.during], shares, yerr=bars if known else None, label=label, **style)
    axes.set_xlim(-margin, last + 2 * margin)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    ticks = MaxNLocator(integer=True, steps=[1, 2, 5, 10]).tick_values(0, last)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= last])
    axes.set_ylabel("success (% of valid episodes)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8, framealpha=0.85)
    else:
        axes.text(0.5, 0.5, "nothing has been logged yet", transform=axes.transAxes, ha="center", va="center")


def _draw_evaluation(axes: Axes, evaluation: Evaluation, word: str, x: float, colour: str, line: str) -> None:
    label = f"held-out seeds {word} training: {percent(evaluation.success)}"
    bars = None
    if evaluation.episodes:
        label += f" (95% interval {100 * evaluation.low:.0f}–{percent(evaluation.high)}, n = {evaluation.episodes})"
        bars = [[evaluation.success - evaluation.low], [evaluation.high - evaluation.success]]
        axes.axhspan(evaluation.low, evaluation.high, color=colour, alpha=0.08, lw=0)
    axes.axhline(evaluation.success, color=colour, lw=1.2, ls=line, alpha=0.9)
    axes.errorbar([x], [evaluation.success], yerr=bars, fmt="D", ms=6, color=colour, capsize=4, lw=1.8, label=label)


def _draw_statuses(axes: Axes, summary: Summary) -> None:
    updates = [line["update"] for line in summary.train]
    bottom = np.zeros(len(updates))
    for status in ExitStatus:
        if not summary.exit_statuses[status]:
            continue
        counts = np.array([number(line, f"exit_status/{status}") or 0.0 for line in summary.train])
        hatch = "////" if status in NOT_THE_POLICY else None
        colour = STATUS_COLOURS[status]
        axes.bar(updates, counts, bottom=bottom, width=0.86, color=colour, hatch=hatch, lw=0, label=str(status))
        bottom += counts
    axes.set_ylabel("episodes")
    axes.set_ylim(0, max(bottom.max() * 1.02, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.grid(visible=False, axis="x")
    columns = len(axes.get_legend_handles_labels()[0])
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(**above, fontsize=8, frameon=False, handlelength=1.2)


def _draw_side(figure: Figure, place: SubplotSpec, summary: Summary, panels: list[tuple[str, str]]) -> None:
    grid = place.subgridspec(len(panels), 1)
    first = None
    for at, (key, title) in enumerate(panels):
        axes = figure.add_subplot(grid[at], sharex=first)
        first = first or axes
        updates, values = series(summary.train, key)
        axes.plot(updates, values, color=TRAIN, lw=1.3, marker="o" if len(values) < 30 else None, ms=2.5)
        if key == "grad_norm" and min(values) > 0 and max(values) > 50 * min(values):
            axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.tick_params(labelsize=8, labelbottom=at == len(panels) - 1)
    axes.set_xlabel("update")


def _draw_tasks(figure: Figure, place: SubplotSpec, summary: Summary, tasks: list[str], note: str) -> None:
    rows = math.ceil(len(tasks) / TASK_COLUMNS)
    columns = math.ceil(len(tasks) / rows)
    grid = place.subgridspec(rows, columns)
    last = max(summary.updates, 1)
    for at, task in enumerate(tasks):
        row, column = divmod(at, columns)
        axes = figure.add_subplot(grid[row, column])
        updates, values = series(summary.train, f"success/{task}")
        if len(values) < 8:
            axes.plot(updates, values, "o-", ms=3, lw=1, color=TRAIN, mew=0)
        else:
            axes.plot(updates, values, "o", ms=1.8, color=TRAIN, alpha=0.3, mew=0)
            axes.plot(updates, moving_average(values, smoothing_window(len(values))), color=TRAIN, lw=1.4)
        shares = [evaluation.tasks.get(task) if evaluation else None for evaluation in (summary.before, summary.after)]
        for share, x, colour in zip(shares, (0, last), (BEFORE, AFTER), strict=True):
            if share is not None:
                axes.plot([x], [share], "D", ms=5.5, color=colour, clip_on=False, zorder=5)
        title = f"{_short(task)}\n{' → '.join(map(percent, shares))}"
        axes.set_title(title, fontsize=8, loc="left", linespacing=1.35)
        axes.set_xlim(-0.06 * last, 1.06 * last)
        axes.set_ylim(-0.05, 1.05)
        axes.set_yticks([0, 0.5, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, steps=[1, 2, 5, 10]))
        axes.tick_params(labelsize=7, labelleft=column == 0, labelbottom=at + columns >= len(tasks))
        if column == 0:
            axes.set_ylabel("success (%)", fontsize=7.5)
    figure.text(0.008, 0.004, note, fontsize=8, ha="left", va="bottom", transform=figure.transFigure)
    figure.get_layout_engine().set(rect=(0, 0.25 / figure.get_figheight(), 1, 1 - 0.25 / figure.get_figheight()))


def _task_choice(summary: Summary) -> tuple[list[str], str]:
    """Which tasks get a panel, in the order shown, and the note below them."""
    marks = "Per task: diamonds are held-out seeds before (orange) and after (green) training, the line is training"
    names = summary.tasks
    if len(names) <= TASK_PANELS:
        return names, f"{marks}."

    def change(task: str) -> float:
        _, values = series(summary.train, f"success/{task}")
        first = summary.before.tasks.get(task) if summary.before else None
        final = summary.after.tasks.get(task) if summary.after else None
        first = first if first is not None else values[0] if values else 0.0
        final = final if final is not None else values[-1] if values else first
        return abs(final - first)

    chosen = sorted(sorted(names, key=change, reverse=True)[:TASK_PANELS])
    return chosen, f"{marks}. Shown: the {TASK_PANELS} of {len(names)} tasks that changed the most."


def smoothing_window(count: int) -> int:
    """An odd number of points, about an eighth of all, at least 3."""
    return max(3, count // 8 | 1)


def moving_average(values: list[float], width: int) -> list[float]:
    """Mean over `width` (odd) points around each; near the ends, over a window that shrinks on both sides alike."""
    half = width // 2
    means: list[float] = []
    for at in range(len(values)):
        reach = min(half, at, len(values) - 1 - at)
        means.append(float(np.mean(values[at - reach : at + reach + 1])))
    return means


def _short(task: str, length: int = 26) -> str:
    name = task if len(task) <= length else f"…{task[1 - length :]}"
    return plain(name)


def plain(text: str) -> str:
    return printable(text).replace("\n", " ").replace("$", r"\$")  # "$" would start a formula


def style(dark: bool) -> dict[str, Any]:
    ink, paper, faint = ("#d7dae0", "#16181d", "#3a3f4a") if dark else ("#24292f", "#ffffff", "#d5d9de")
    lines = ["#56B4E9", "#F08A3C", "#2FBF94"] if dark else ["#0072B2", "#D55E00", "#009E73"]
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": faint,
        "axes.facecolor": paper,
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "legend.facecolor": paper,
        "legend.edgecolor": faint,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": faint,
        "grid.linewidth": 0.6,
        "grid.alpha": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        "hatch.color": paper,
        "axes.prop_cycle": cycler(color=lines),
    }
