"""Text for people: one line of metrics for the console, and what can be shown of any text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from webagent_core.episode.trajectory import ExitStatus

_AFTER_THE_STATUSES = (
    ("loss", "loss {:.3f}"),
    ("kl", "kl {:.3f}"),
    ("grad_norm", "grad {:.2f}"),
    ("entropy", "entropy {:.2f}"),
    ("clip_ratio", "clip {:.2f}"),
    ("tokens_per_second", "{:.0f} tok/s"),
    ("browser_steps_per_second", "{:.0f} steps/s"),
)


def one_line(metrics: Mapping[str, Any], updates: int | None = None) -> str:
    """A metric line for people: what is missing is left out, and so are exit statuses that did not occur.

    updates: how many the run will make, shown as `update 3/20`.
    """
    if metrics.get("phase", "train") == "train":
        parts = [f"update {metrics['update']}" + (f"/{updates}" if updates is not None else "")]
    else:
        at = f" (update {metrics['update']})" if metrics["phase"] == "during" else ""
        parts = [f"{metrics['phase']} training{at}"]
    if "episodes" in metrics:
        parts.append(f"{metrics['episodes']} episodes")
    for key, form in (("success", "success {:.2f}"), ("return", "return {:.2f}"), ("steps", "steps {:.1f}")):
        if metrics.get(key) is not None:
            parts.append(form.format(metrics[key]))
    counts = [(status, metrics.get(f"exit_status/{status}")) for status in ExitStatus]
    if any(count for _, count in counts):
        parts.append(" ".join(f"{status} {count:.0f}" for status, count in counts if count))
    if metrics.get("cut_steps"):
        parts.append(f"cut prompts {metrics['cut_steps']:.0f}")
    for key, form in _AFTER_THE_STATUSES:
        if metrics.get(key) is not None and not math.isnan(metrics[key]):
            parts.append(form.format(metrics[key]))
    return "  ".join(parts)


def printable(text: str) -> str:
    """Characters that neither HTML nor a font can hold, NUL and lone surrogates among them, become U+FFFD."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]", "\ufffd", text)
