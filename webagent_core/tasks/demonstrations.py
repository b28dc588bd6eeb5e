"""Scripted demonstrators for the default MiniWoB++ tasks: what imitation warms a policy up with.

Each is a rule from (goal, page text) to the next action, and reads nothing that the policy does not read. It looks
only at the page as it is now (what is filled, what is checked), so it also knows the way on from somebody else's
mistake. """

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from webagent_core.episode.actions import Action

_LINE = re.compile(r"^(?P<name>.*) (?P<id>\d+) <(?P<kind>[^>]+)>(?P<state>.*)$")


@dataclass(frozen=True)
class Element:
    """One line of a page's text (see browser/observe.js)."""

    name: str
    id: str
    kind: str
    state: str

    @property
    def value(self) -> str:
        found = re.match(r' = "([^"]*)"', self.state)
        return found.group(1) if found else ""

    @property
    def checked(self) -> bool:
        return self.state.startswith(" checked")


def elements(observation: str) -> list[Element]:
    return [Element(**found.groupdict()) for line in observation.splitlines() if (found := _LINE.match(line))]


@dataclass(frozen=True)
class Move:
    """An action and the element it is about."""

    target: Element
    action: Action

    def response(self) -> str:
        """In the words the policy is to learn: the target restated, then the action on it."""
        return f"{self.target.name} {self.target.id}\nAction: {self.action}"


def _click(element: Element) -> Move:
    return Move(element, Action("click", element=element.id))


def _type(element: Element, text: str) -> Move:
    return Move(element, Action("type", element=element.id, text=text))


def _named(page: list[Element], name: str, *kinds: str) -> Element:
    """The first element of that name (and kind); names are compared with case first, then without."""
    of_kind = [element for element in page if not kinds or element.kind in kinds]
    for same in (lambda a, b: a == b, lambda a, b: a.lower() == b.lower()):
        for element in of_kind:
            if same(element.name, name):
                return element
    raise LookupError(f"no {' or '.join(kinds) or 'element'} named {name!r} on the page")


def _kind(page: list[Element], *kinds: str) -> list[Element]:
    return [element for element in page if element.kind in kinds]


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def _press_quoted(goal: str, page: list[Element]) -> Move:
    return _click(_named(page, _quoted(goal)[0], "button", "link", "clickable"))


def _press_one(goal: str, page: list[Element]) -> Move:
    return _click(_named(page, "ONE"))


def _tab(goal: str, page: list[Element]) -> Move:
    return _click(_named(page, re.search(r"Tab #\d+", goal).group(), "tab"))


def _dialog_button(goal: str, page: list[Element]) -> Move:
    wanted = _quoted(goal)[0]
    return _click(_named(page, "Close" if wanted == "x" else wanted, "button"))


def _expand_and_submit(goal: str, page: list[Element]) -> Move:
    section = next(element for element in page if element.name.startswith("Section"))
    return _click(section if " expanded" not in section.state else _named(page, "Submit"))


def _check_and_submit(goal: str, page: list[Element]) -> Move:
    """Unticks what is wrong, then ticks in the goal's order: the next name is the one after the last ticked."""
    wanted = re.match(r"Select (.*) and click Submit", goal).group(1).split(", ")
    boxes = _kind(page, "checkbox", "radio")
    wrong = [box for box in boxes if box.kind == "checkbox" and box.checked and box.name not in wanted]
    missing = [box for name in wanted for box in boxes if box.name == name and not box.checked]
    return _click(next(iter(wrong + missing), None) or _named(page, "Submit", "button"))


def _choose_and_submit(goal: str, page: list[Element]) -> Move:
    wanted = re.match(r"Select (.*) from the list and click Submit", goal).group(1)
    field = _kind(page, "select")[0]
    if field.value == wanted:
        return _click(_named(page, "Submit", "button"))
    return Move(field, Action("select", element=field.id, option=wanted))


def _fill(page: list[Element], wanted: list[str], submit: str) -> Move:
    for field, text in zip(_kind(page, "input text", "input password"), wanted, strict=True):
        if field.value != text:
            return _type(field, text)
    return _click(_named(page, submit, "button"))


def _enter_text(goal: str, page: list[Element]) -> Move:
    return _fill(page, _quoted(goal)[:1], "Submit")


def _log_in(goal: str, page: list[Element]) -> Move:
    return _fill(page, _quoted(goal), "Login")


DEMONSTRATORS: dict[str, Callable[[str, list[Element]], Move]] = {
    "miniwob/click-button": _press_quoted,
    "miniwob/click-checkboxes": _check_and_submit,
    "miniwob/click-checkboxes-transfer": _check_and_submit,
    "miniwob/click-collapsible": _expand_and_submit,
    "miniwob/click-dialog-2": _dialog_button,
    "miniwob/click-link": _press_quoted,
    "miniwob/click-option": _check_and_submit,
    "miniwob/click-tab": _tab,
    "miniwob/click-test-2": _press_one,
    "miniwob/choose-list": _choose_and_submit,
    "miniwob/enter-text": _enter_text,
    "miniwob/login-user": _log_in,
}


def check_demonstrated(name: str) -> str:
    """Return `name`, or raise ValueError if nobody can demonstrate that task."""
    if name not in DEMONSTRATORS:
        raise ValueError(
            f"task {name!r} has no demonstrator to warm up with; there are {', '.join(sorted(DEMONSTRATORS))}"
        )
    return name


def demonstrate(task: str, goal: str, observation: str, mistakes: float, rng: random.Random) -> str:
    """The demonstrator's response. Where that is a click, with probability `mistakes` one on the page's last element.

    That is an impatient hand: it presses Submit before the boxes are ticked, or the nearest button. One habit that all
    tasks share, and not a random choice, which would teach a small policy to mix names up; and of clicks alone, lest
    unlearning it teaches a small policy to type where it should click.

    Raises:
        KeyError: there is no demonstrator for `task`.
        LookupError: the page does not show what the goal speaks of.
    """
    page = elements(observation)
    move = DEMONSTRATORS[task](goal, page)
    if rng.random() < mistakes and move.action.name == "click":
        move = _click(page[-1])
    return move.response()
