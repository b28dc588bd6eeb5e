"""report.html: what happened in a run, and its trajectories step by step, in one file that needs no network.

The text of web pages is untrusted. The template escapes everything, the trajectories travel as JSON that cannot close
its script element, the page's script puts text into the document as text only, and a content security policy lets
nothing run but that script.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus
from webagent_core.report.learning_curve import plot_learning_curve
from webagent_core.report.run_directory import PHASES, RunDirectory, settings_in
from webagent_core.report.summary import Evaluation, Summary, duration, headline, number, percent, series, summarise
from webagent_core.report.text import printable

EXIT_STATUS_MEANING = {
    ExitStatus.ANSWERED: "The policy ended the episode, by stop(...) or by an action with which the task itself ends.",
    ExitStatus.STEP_LIMIT: "The episode used up its steps.",
    ExitStatus.FORMAT_ERROR: "Too many responses in a row held no action.",
    ExitStatus.CONTEXT_OVERFLOW: "The prompt no longer fit into the context of the model.",
    ExitStatus.TASK_TIMEOUT: "The wall clock of the task ran out. A policy can cause it, so the reward stands.",
    ExitStatus.ENV_ERROR: "The browser or the site failed.",
    ExitStatus.JUDGE_ERROR: "The reward could not be determined.",
    ExitStatus.CANCELLED: "The run was stopped while the episode went on.",
}
METRIC_MEANING = {
    "success": "Share of the valid episodes of an update with a reward of at least 1.",
    "return": "Mean reward of the valid episodes.",
    "steps": "Model calls per episode, mean.",
    "cut_steps": "Steps whose prompt was cut to fit the model's context; the step says what went.",
    "format_errors": "Responses of the update that held no action.",
    "failed_actions": "Actions of the update that the page answered with an error.",
    "loss": "The objective that was minimised. With policy gradients its size says little; it hovers around 0.",
    "kl": "How far the policy is from the reference model, per token, in nats.",
    "grad_norm": "Length of the gradient. Jumps of a factor of ten announce trouble.",
    "entropy": "How undecided the policy is per token, in nats. Near 0 it no longer explores.",
    "clip_ratio": "Share of the tokens whose update the clip cut off.",
    "tokens_per_second": "Tokens the policy read and wrote, per second.",
    "browser_steps_per_second": "Actions done in the browsers, per second.",
}


@dataclass
class _Line:
    """What choosing needs to know about a line of trajectories.jsonl."""

    id: int  # number of the line, from 0
    update: int
    phase: str
    task: str
    group: str
    outcome: str  # "success", "failure" or "invalid"
    exit_status: str | None
    reward: float | None
    size: int  # bytes it adds to the page, at most

    @property
    def siblings(self) -> tuple[str, int, str]:
        """The same for all of one group."""
        return self.phase, self.update, self.group


def make_report(run: RunDirectory) -> tuple[Path, Path]:
    """Write learning_curve.png and report.html of a run, finished or not, into its folder; returns both files."""
    curve, page = run.path / "learning_curve.png", run.path / "report.html"
    plot_learning_curve(run, curve)
    write_report(run, page)
    return curve, page


def write_report(
    run: RunDirectory,
    path: str | os.PathLike[str],
    *,
    max_trajectories: int = 300,
    max_bytes: int = 15_000_000,
) -> None:
    """Write the report of a run, finished or not, to one HTML file.

    max_trajectories: how many trajectories are embedded at most; see `choose`.
    max_bytes: what the trajectories and their screenshots may add to the page, which has about 0.3 MB without them.
    """
    summary = summarise(run.metrics())
    lines = list(_lines(run))
    chosen = choose(lines, max_trajectories, max_bytes)
    environment = Environment(
        loader=PackageLoader("webagent_core.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": _points, "figure": _figure}
    templates = Path(__file__).with_name("templates")
    script = (templates / "report.js").read_text("utf-8")
    page = environment.get_template("report.html.j2").render(
        name=run.name,
        headline=headline(summary),
        summary=summary,
        duration=duration,
        curve={"light": _picture(run, dark=False), "dark": _picture(run, dark=True)},
        tasks=_task_rows(summary, lines),
        config=list(_config_rows(run.config())),
        exit_statuses=[(s, text, s in NOT_THE_POLICY) for s, text in EXIT_STATUS_MEANING.items()],
        metrics=_metric_rows(summary),
        invalid=", ".join(f"{n} {s}" for s, n in summary.exit_statuses.items() if n and s in NOT_THE_POLICY),
        recorded=len(lines),
        shown=len(chosen),
        script=Markup(script),
        style=Markup((templates / "report.css").read_text("utf-8")),
        script_hash=base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii"),
        data=Markup(_script_safe(_embedded(run, lines, chosen))),
    )
    Path(path).write_text(printable(page), "utf-8")


def choose(lines: Sequence[_Line], most: int, max_bytes: int) -> set[int]:
    """Ids of the trajectories to embed: spread over phases and updates, tasks, and ways to end.

    Taken one by one, always the one whose update, task and end are the least represented so far; a value's share grows
    with the square root of how often it occurs, so that rare ends (an env_error) are seen and common ones still lead.
    With each goes a sibling of its group that ended with another outcome, where there is one: the comparison that a
    group's advantages are made of.
    """

    def facets(line: _Line) -> tuple[tuple[Any, ...], ...]:
        return ("update", line.phase, line.update), ("task", line.task), ("end", line.exit_status, line.outcome)

    total = Counter(facet for line in lines for facet in facets(line))
    taken: Counter[tuple[Any, ...]] = Counter()
    groups: dict[tuple[str, int, str], list[_Line]] = {}
    for line in lines:
        groups.setdefault(line.siblings, []).append(line)
    chosen: set[int] = set()

    def cost(line: _Line) -> float:
        return sum((taken[facet] + 1) / math.sqrt(total[facet]) for facet in facets(line))

    # Costs only grow, so the cheapest one is that whose cost is still true when it is popped.
    heap = [(cost(line), line.id, line) for line in lines]
    heapq.heapify(heap)
    while heap and len(chosen) < most:
        old, at, line = heapq.heappop(heap)
        if at in chosen:
            continue
        if (now := cost(line)) > old:
            heapq.heappush(heap, (now, at, line))
            continue
        group = groups[line.siblings]
        contrast = any(other.id in chosen and other.outcome != line.outcome for other in group)
        others = [] if contrast else [other for other in group if other.outcome != line.outcome]
        for each in [line, *others[:1]]:
            size = each.size + 120 * len(group)  # the page lists the whole group
            if size <= max_bytes and len(chosen) < most:
                max_bytes -= size
                chosen.add(each.id)
                taken.update(facets(each))
    return chosen


def _lines(run: RunDirectory) -> Iterator[_Line]:
    sizes = {f"screenshots/{file.name}": file.stat().st_size for file in run.screenshots_path.glob("*.jpg")}
    for at, line in enumerate(run.trajectories()):
        pictures = sum(sizes.get(step["screenshot"], 0) * 4 // 3 + 40 for step in line["steps"])
        text = json.dumps(line)
        size = len(text) + 5 * sum(text.count(sign) for sign in "<>&") + pictures
        outcome = "success" if line["success"] else "failure" if line["valid"] else "invalid"
        known = (line[key] for key in ("update", "phase", "task", "group"))
        yield _Line(at, *known, outcome, line["exit_status"], line["reward"], size)


def _embedded(run: RunDirectory, lines: Sequence[_Line], chosen: set[int]) -> dict[str, Any]:
    """The data of the page's script. Texts and pictures that repeat are held once and named by their index."""
    texts: dict[str, int] = {}
    pictures: dict[bytes, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    def picture(name: str | None) -> int | None:
        data = run.screenshot(name)
        return None if data is None else pictures.setdefault(data, len(pictures))

    def step(line: Mapping[str, Any]) -> dict[str, Any]:
        said = [_message_text(message) for message in line["messages"]]
        kept = ("url", "response", "action", "error", "prompt_tokens", "response_tokens")
        return {key: line[key] for key in kept} | {
            "messages": [
                [str(message.get("role", "")), text(t)] for message, t in zip(line["messages"], said, strict=True)
            ],
            "observation": None if any(line["observation"] in t for t in said) else text(line["observation"]),
            "screenshot": picture(line["screenshot"]),
            "cut": line.get("cut"),
        }

    members: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in lines:
        member = {"id": line.id, "outcome": line.outcome, "exit_status": line.exit_status, "reward": _json(line.reward)}
        members.setdefault(line.siblings, []).append(member | {"embedded": line.id in chosen})
    groups: dict[tuple[str, int, str], int] = {}

    def group(line: _Line) -> int:
        return groups.setdefault(line.siblings, len(groups))

    trajectories = []
    kept = ("update", "phase", "group", "task", "seed", "goal", "exit_status", "detail", "answer")
    for at, line in enumerate(run.trajectories()):
        if at in chosen:
            trajectories.append(
                {key: line[key] for key in kept}
                | {key: _json(line[key]) for key in ("reward", "advantage", "seconds")}
                | {
                    "id": at,
                    "outcome": lines[at].outcome,
                    "siblings": group(lines[at]),
                    "evidence": [_evidence(each) for each in line.get("evidence", ())],
                    "steps": [step(each) for each in line["steps"]],
                }
            )
    trajectories.sort(key=lambda t: (t["update"], PHASES.index(t["phase"]), t["id"]))
    return {
        "trajectories": trajectories,
        "groups": [members[siblings] for siblings in groups],
        "texts": list(texts),
        "pictures": [f"data:image/jpeg;base64,{base64.b64encode(data).decode('ascii')}" for data in pictures],
        "meanings": {str(status): meaning for status, meaning in EXIT_STATUS_MEANING.items()},
    }


def _message_text(message: Mapping[str, Any]) -> str:
    """What a chat message says, with a mark where a picture part stood."""
    content = message.get("content")
    if isinstance(content, str):
        said = content
    else:
        parts = content if isinstance(content, list) else []
        said = "\n".join(
            str(part["text"]) if isinstance(part, dict) and "text" in part else "[screenshot]" for part in parts
        )
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return f"{said}\n{json.dumps(rest)}" if rest else said


def _evidence(record: Mapping[str, Any]) -> list[str]:
    """[title, text] of one thing that a reward rests on: a judge's words whole, anything else as it is."""
    rest = {key: value for key, value in record.items() if key not in ("kind", "text", "model", "vote")}
    vote = f", vote {record['vote'] + 1}" if "vote" in record else ""
    title = f"{str(record.get('kind', 'evidence')).replace('_', ' ')}{vote}"
    if "model" in record:
        title += f" ({record['model']})"
    return [title, str(record["text"]) if "text" in record else json.dumps(rest, ensure_ascii=False, default=str)]


def _task_rows(summary: Summary, lines: Sequence[_Line]) -> list[dict[str, Any]]:
    episodes = Counter((line.phase, line.task) for line in lines if line.outcome != "invalid")

    def cell(phase: str, evaluation: Evaluation | None, task: str) -> dict[str, Any]:
        return {"share": evaluation.tasks.get(task) if evaluation else None, "episodes": episodes[phase, task]}

    rows = []
    for task in summary.tasks:
        before, after = cell("before", summary.before, task), cell("after", summary.after, task)
        _, train = series(summary.train, f"success/{task}")
        both = before["share"] is not None and after["share"] is not None
        change = after["share"] - before["share"] if both else None
        last = train[-5:]
        in_training = sum(last) / len(last) if last else None
        rows.append({"task": task, "before": before, "after": after, "change": change, "train": in_training})
    return rows


def _metric_rows(summary: Summary) -> list[tuple[str, str, float | None, float | None]]:
    rows = []
    for key, meaning in METRIC_MEANING.items():
        values = [value for line in summary.train if (value := number(line, key)) is not None]
        rows.append((key, meaning, values[0] if values else None, values[-1] if values else None))
    return rows


def _config_rows(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(dotted name, value, provenance) of every leaf."""
    for path, value, source in settings_in(config):
        yield ".".join(path), _plain(value), source or ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _picture(run: RunDirectory, *, dark: bool) -> str:
    file = io.BytesIO()
    plot_learning_curve(run, file, dark=dark)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _json(value: float | list[float] | None) -> float | str | list | None:
    if isinstance(value, list):
        return [_json(each) for each in value]
    return value if value is None or math.isfinite(value) else str(value)


def _script_safe(value: Any) -> str:
    """JSON that can stand inside a script element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _points(change: float | None) -> str:
    return "–" if change is None else f"{100 * change:+.0f}".replace("-", "−")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
