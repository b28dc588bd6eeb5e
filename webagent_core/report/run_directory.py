"""The folder of one training run: written while it trains, read by the learning curve, the viewer and people.

    config.yaml         the resolved configuration
    metrics.jsonl       one line per update and per evaluation
    trajectories.jsonl  one line per trajectory
    screenshots/*.jpg   the pages its steps saw

Both .jsonl files are strict JSON, ASCII only, one object a line. Numbers that JSON lacks are written as the strings
"NaN", "Infinity" and "-Infinity"; the readers turn them back into floats.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from webagent_core.episode.trajectory import FinalPage, Step, Trajectory

PHASES = ("before", "train", "during", "after")  # all but "train" are evaluations on held-out seeds

_NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PICTURE_PARTS = {"image", "image_url", "input_image"}


class RunDirectory:
    """One run's folder, made if it is not there. One process writes at a time; any number may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._logged: Counter[tuple[str, int]] = Counter()  # trajectories so far, by (phase, update)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trajectories_path(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def screenshots_path(self) -> Path:
        return self.path / "screenshots"

    # ---- configuration

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml. A leaf may be `{"value": ..., "from": "paper"}`: where the value comes from."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120)
        _replace(self.path / "config.yaml", [text.encode("utf-8")])

    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty where none was written."""
        path = self.path / "config.yaml"
        return yaml.safe_load(path.read_text("utf-8")) or {} if path.exists() else {}

    # ---- metrics

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line. It must hold `update` (int) and `phase` (one of `PHASES`).

        Keys the report knows: `success` and `success/<task>` (share of the valid episodes, 0 to 1), `episodes` (valid
        episodes behind `success`), `return` (mean reward of the valid ones), `steps` (mean per episode),
        `exit_status/<status>` (episodes, invalid ones too), `cut_steps` (steps whose prompt was cut to fit), `loss`,
        `kl` (nats), `grad_norm`, `entropy` (nats), `clip_ratio`, `tokens_per_second`, `browser_steps_per_second`, and
        `seconds`: a mapping from a part of the update to its wall clock, parts that do not overlap, or with `total`.
        Other keys are kept.
        """
        _check(metrics.get("update"), metrics.get("phase"))
        _append(self.metrics_path, [_strict(dict(metrics))])

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl, in the order written. A torn last line is left out."""
        return [_loose(line) for line in _read(self.metrics_path)]

    # ---- trajectories

    def log_trajectories(
        self,
        update: int,
        phase: str,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float | list[float] | None] | None = None,
    ) -> None:
        """Append one line per trajectory and write the screenshots of its steps.

        advantages: one per trajectory, a number or one a step; None where it has none (evaluation, invalid, dropped
            group).
        """
        _check(update, phase)
        if advantages is None:
            advantages = [None] * len(trajectories)
        if len(advantages) != len(trajectories):
            raise ValueError(f"advantages: got {len(advantages)}, allowed is one per trajectory ({len(trajectories)})")
        lines = []
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            number = self._logged[phase, update]
            self._logged[phase, update] += 1
            lines.append(self._trajectory_line(update, phase, number, trajectory, advantage))
        _append(self.trajectories_path, lines)

    def trajectories(self) -> Iterator[dict[str, Any]]:
        """Every line of trajectories.jsonl, in the order written, one at a time. A torn last line is left out.

        Two runs with equal seeds differ in nothing but `seconds`, the last field.
        """
        for line in _read(self.trajectories_path):
            for step in line["steps"]:
                if "observation" not in step:
                    step["observation"] = step["messages"][-1]["content"]
            yield line | {key: _loose(line[key]) for key in ("reward", "advantage", "seconds")}

    def screenshot(self, name: str | None) -> bytes | None:
        """The JPEG that a step names; None where it names none, or the file is gone or not inside this folder."""
        if name is None:
            return None
        path = (self.path / name).resolve()
        return path.read_bytes() if path.is_relative_to(self.path.resolve()) and path.is_file() else None

    def _trajectory_line(
        self, update: int, phase: str, number: int, trajectory: Trajectory, advantage: float | list[float] | None
    ) -> dict[str, Any]:
        task = re.sub(r"[^A-Za-z0-9]+", "-", trajectory.task).strip("-")[:60]
        stem = f"{phase}-{update:05d}-{number:04d}-{task}-seed{trajectory.seed}"
        steps = [self._step_line(step, f"{stem}-step{at:02d}") for at, step in enumerate(trajectory.steps, start=1)]
        return {
            "update": update,
            "phase": phase,
            "group": trajectory.group,
            "task": trajectory.task,
            "seed": trajectory.seed,
            "goal": trajectory.goal,
            "reward": _strict(trajectory.reward),
            "advantage": _strict(advantage),
            "exit_status": None if trajectory.exit_status is None else str(trajectory.exit_status),
            "valid": trajectory.valid,
            "success": trajectory.success,
            "detail": trajectory.detail,
            "answer": trajectory.answer,
            **({"evidence": _strict(trajectory.evidence)} if trajectory.evidence else {}),  # what a judge said
            **({} if trajectory.outcome is None else {"outcome": _strict(trajectory.outcome)}),  # if not `reward`
            "steps": steps,
            **({} if trajectory.final is None else {"final": self._final_line(trajectory.final, stem)}),
            "seconds": _strict(trajectory.seconds),
        }

    def _kept_picture(self, picture: bytes | None, stem: str) -> str | None:
        if picture is None:
            return None
        self.screenshots_path.mkdir(exist_ok=True)
        (self.screenshots_path / f"{stem}.jpg").write_bytes(picture)
        return f"screenshots/{stem}.jpg"

    def _final_line(self, page: FinalPage, stem: str) -> dict[str, Any]:
        return {"url": page.url, "text": page.text, "screenshot": self._kept_picture(page.screenshot, f"{stem}-end")}

    def _step_line(self, step: Step, stem: str) -> dict[str, Any]:
        screenshot = self._kept_picture(step.screenshot, stem)
        messages = _without_pictures(step.messages)
        line: dict[str, Any] = {"url": step.url}
        if not messages or messages[-1].get("content") != step.observation:  # else: the reader takes it from there
            line["observation"] = step.observation
        return line | {
            "messages": messages,
            "response": step.response,
            "action": None if step.action is None else str(step.action),
            "error": step.error,
            "screenshot": screenshot,
            "prompt_tokens": len(step.prompt_ids),
            "response_tokens": len(step.response_ids),
            **({"cut": step.cut} if step.cut else {}),  # what of the chat had to go to fit
        }

    # ---- resume

    def truncate_after(self, update: int) -> None:
        """Forget what came after `update`, so that a run resumed from an older checkpoint shows no update twice.

        Lines of later updates go, and every "after" evaluation, since training goes on; -1 forgets everything. So do
        torn last lines and screenshots that no remaining line names. Each file is replaced whole or not at all.
        """

        def stays(line: Mapping[str, Any]) -> bool:
            return line["update"] <= update and line["phase"] != "after"

        if self.metrics_path.exists():
            _replace(self.metrics_path, (_line(line) for line in _read(self.metrics_path) if stays(line)))
        if self.trajectories_path.exists():
            named: set[str] = set()

            def remaining() -> Iterator[bytes]:
                for line in filter(stays, _read(self.trajectories_path)):
                    pages = [*line["steps"], *([line["final"]] if "final" in line else [])]
                    named.update(Path(page["screenshot"]).name for page in pages if page["screenshot"])
                    yield _line(line)

            _replace(self.trajectories_path, remaining())
            for picture in self.screenshots_path.glob("*.jpg"):
                if picture.name not in named:
                    picture.unlink()
        for phase, of in list(self._logged):
            if of > update or phase == "after":
                del self._logged[phase, of]


def settings_in(
    config: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, str | None]]:
    """(path, value, where it comes from) of every leaf of a configuration; None of a leaf that does not say."""
    for name, value in config.items():
        if isinstance(value, Mapping) and set(value) == {"value", "from"}:
            yield (*path, str(name)), value["value"], str(value["from"])
        elif isinstance(value, Mapping) and value:
            yield from settings_in(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value, None


def _check(update: Any, phase: Any) -> None:
    if not isinstance(update, int) or isinstance(update, bool) or update < 0:
        raise ValueError(f"update: got {update!r}, allowed is an integer of at least 0")
    if phase not in PHASES:
        raise ValueError(f"phase: got {phase!r}, allowed is one of {', '.join(PHASES)}")


def _without_pictures(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat with `{"type": ...}` alone for each picture part: the pictures are in screenshots/."""

    def part(content: Any) -> Any:
        picture = isinstance(content, Mapping) and content.get("type") in _PICTURE_PARTS
        return {"type": content["type"]} if picture else content

    return [
        {key: [part(p) for p in value] if isinstance(value, list) else value for key, value in message.items()}
        for message in messages
    ]


def _strict(value: Any) -> Any:
    """The same in what JSON has: scalars of numpy and torch become floats, and see the module's docstring."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _loose(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_loose(item) for item in value]
    return _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode("ascii") + b"\n"


def _append(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    data = b"".join(_line(value) for value in values)
    with path.open("r+b" if path.exists() else "w+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end and (whole := _end_of_last_whole_line(path, end)) < end:  # a write that was cut short
            file.truncate(whole)
        file.seek(0, os.SEEK_END)
        file.write(data)
        file.flush()


def _end_of_last_whole_line(path: Path, end: int, block: int = 1 << 16) -> int:
    with path.open("rb") as file:
        while end:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a .jsonl file. Raises ValueError with the line's number where a whole line is no JSON object."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # the last one, cut short
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}, allowed is one JSON object a line") from error
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number}: got {value!r}, allowed is one JSON object a line")
            yield value


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
