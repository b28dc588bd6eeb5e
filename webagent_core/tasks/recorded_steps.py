"""Recorded episodes cut into single steps, each with the right action: what an offline method is trained on.

A recording is a folder in the shape of AMEX (arXiv:2407.17490), one file an episode:

    instruction_anno/<any name>.json
    screenshot/<image_path>

    {"episode_id": "e1", "instruction": "the goal in words", "task": "shop/buy",
     "steps": [{"step_id": 0, "image_path": "e1-0.jpg", "device_dim": [1440, 3120],
                "action": "TAP", "touch_coord": [720, 312], "lift_coord": [720, 312], "type_text": "",
                "page": "Buy 3 <button>", "element_action": "click(3)", "box": [600, 280, 840, 350]}, ...]}

AMEX's own fields are `episode_id`, `instruction` and, of a step, those up to `type_text`; its actions are the keys of
`AMEX_ACTIONS`, its coordinates pixels of `device_dim`. The others are ours, all optional. `task` groups episodes in
reports. A policy that reads text and acts on elements needs `page`, the text of the page, and `element_action`, one
line of that grammar. `box` is where the element is (left, top, right, bottom); `done`, such a line too, is what was
done instead of the right action, where that was something else: a history holds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from webagent_core.episode.actions import Action, FormatError, parse_action, parse_coordinate_action

POINT_SPACE = "norm1000"  # of the points in `RecordedStep.actions`


@dataclass(frozen=True)
class RecordedStep:
    """One step, and all of its episode that a prompt for it may show. Plain data, so that a data set can hold it.

    Actions are in their one-line form: on elements, or at points from 0 to 1000 over each side of the screenshot.
    """

    task: str
    episode: str
    goal: str
    pages: list[str]  # texts of the pages up to this step, its own last; "" where only a picture was recorded
    screenshots: list[str]  # files of their pictures; "" where there is none
    actions: list[str]  # what was done on all of these but the last; "" where it cannot be said in this grammar
    gold: str  # what is right to do on the last
    box: list[float] | None = None  # of the element in question, from 0 to 1000 as points are

    @property
    def name(self) -> str:
        return f"{self.episode}/{len(self.actions)}"

    def row(self) -> dict[str, Any]:
        """For `datasets.Dataset.from_list`; `RecordedStep.of` makes the step again."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RecordedStep:
        """The step of a data set's row, whatever other columns that has."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def read_steps(folder: Path, *, at_points: bool = False) -> list[RecordedStep]:
    """Every step of a recording, episodes in the order of their files' names.

    Args:
        at_points: actions as points of the screenshot, and steps whose right action is none are left out; otherwise
            as actions on elements, which every step must then have.

    Raises:
        FileNotFoundError: there is no episode, or a screenshot is missing.
        ValueError: names the file, the step and the field that cannot be read.
    """
    files = sorted((folder / "instruction_anno").glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder}/instruction_anno holds no *.json: one file an episode is needed")
    steps: list[RecordedStep] = []
    for file in files:
        episode = json.loads(file.read_text(encoding="utf-8"))
        for name in ("instruction", "steps"):
            if not episode.get(name):
                raise ValueError(f"{file}: {name} is missing")
        steps += _steps_of(episode, file, folder / "screenshot", at_points)
    return steps


def _steps_of(episode: Mapping[str, Any], file: Path, pictures: Path, at_points: bool) -> list[RecordedStep]:
    pages: list[str] = []
    screenshots: list[str] = []
    actions: list[str] = []
    found = []
    for number, step in enumerate(episode["steps"]):
        where = f"{file}: steps[{number}]"
        picture = pictures / step["image_path"] if step.get("image_path") else None
        if picture and not picture.is_file():
            raise FileNotFoundError(f"{where}.image_path = {step['image_path']!r}: {picture} is not there")
        if not at_points and not step.get("page"):
            raise ValueError(f"{where}.page is missing: a policy that acts on elements reads the page's text")
        pages.append(step.get("page") or "")
        screenshots.append(str(picture) if picture else "")
        action = _point_action(where, step) if at_points else _element_action(where, step)
        if action is not None:
            found.append(
                RecordedStep(
                    task=episode.get("task") or "amex",
                    episode=str(episode.get("episode_id") or file.stem),
                    goal=episode["instruction"],
                    pages=list(pages),
                    screenshots=list(screenshots),
                    actions=list(actions),
                    gold=str(action),
                    box=_box(where, step),
                )
            )
        done = step.get("done") if not at_points else None
        actions.append(done or ("" if action is None else str(action)))
    return found


def write_episode(folder: Path, name: str, episode: Mapping[str, Any], pictures: Mapping[str, bytes]) -> None:
    """Add one episode to a recording, with the pictures that its steps name."""
    for part in ("instruction_anno", "screenshot"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file, picture in pictures.items():
        (folder / "screenshot" / file).write_bytes(picture)
    (folder / "instruction_anno" / f"{name}.json").write_text(json.dumps(episode, indent=1), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- actions


def action_on_element(line: str) -> Action | FormatError:
    return parse_action(line)


def action_at_point(line: str) -> Action | FormatError:
    return parse_coordinate_action(line, space=POINT_SPACE)


def _element_action(where: str, step: Mapping[str, Any]) -> Action:
    line = step.get("element_action")
    action = action_on_element(line) if line else FormatError("empty", "it is missing")
    if isinstance(action, FormatError):
        raise ValueError(f"{where}.element_action = {line!r} is not allowed: {action.message}")
    return action


def _point_action(where: str, step: Mapping[str, Any]) -> Action | None:
    name = step.get("action")
    if name is None:
        return None
    if name not in AMEX_ACTIONS:
        raise ValueError(f"{where}.action = {name!r} is not allowed: one of {', '.join(AMEX_ACTIONS)}")
    return AMEX_ACTIONS[name](where, step)


def _tap(where: str, step: Mapping[str, Any]) -> Action:
    x, y = _point(where, step, "touch_coord")
    return Action("click", x=x, y=y)


def _swipe(where: str, step: Mapping[str, Any]) -> Action:
    """A finger that moves up brings what is below into view: scroll down. Where it touched is not part of it."""
    (x, y), (x2, y2) = _point(where, step, "touch_coord"), _point(where, step, "lift_coord")
    if abs(x2 - x) > abs(y2 - y):
        return Action("scroll", direction="right" if x2 < x else "left")
    return Action("scroll", direction="down" if y2 < y else "up")


def _type(where: str, step: Mapping[str, Any]) -> Action:
    if not isinstance(step.get("type_text"), str):
        raise ValueError(f"{where}.type_text = {step.get('type_text')!r} is not allowed: the text that was typed")
    return Action("type", text=step["type_text"])


# What AMEX calls an action, as one of ours. There is no home button among them: the key of that name stands for it.
AMEX_ACTIONS: dict[str, Callable[[str, Mapping[str, Any]], Action]] = {
    "TAP": _tap,
    "SWIPE": _swipe,
    "TYPE": _type,
    "PRESS_BACK": lambda where, step: Action("back"),
    "PRESS_HOME": lambda where, step: Action("hotkey", keys=("home",)),
    "PRESS_ENTER": lambda where, step: Action("hotkey", keys=("enter",)),
    "TASK_COMPLETE": lambda where, step: Action("stop", answer=""),
    "TASK_IMPOSSIBLE": lambda where, step: Action("stop", answer="impossible"),
}


def _point(where: str, step: Mapping[str, Any], field: str) -> tuple[int, int]:
    x, y = _scaled(where, step, field, 2)
    return round(x), round(y)


def _box(where: str, step: Mapping[str, Any]) -> list[float] | None:
    return _scaled(where, step, "box", 4) if step.get("box") else None


def _scaled(where: str, step: Mapping[str, Any], field: str, count: int) -> list[float]:
    """Pixels of the device as parts in a thousand of its sides."""
    given, device = step.get(field), step.get("device_dim")
    if not _numbers(device, 2) or min(device) <= 0:
        raise ValueError(f"{where}.device_dim = {device!r} is not allowed: [width, height] in pixels")
    if not _numbers(given, count):
        raise ValueError(f"{where}.{field} = {given!r} is not allowed: {count} numbers, pixels of the screenshot")
    outside = [value for place, value in enumerate(given) if not 0 <= value <= device[place % 2]]
    if outside:
        raise ValueError(f"{where}.{field} = {given!r} is not allowed: inside device_dim = {device!r}")
    return [value / device[place % 2] * 1000 for place, value in enumerate(given)]


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(each, int | float) for each in value)
