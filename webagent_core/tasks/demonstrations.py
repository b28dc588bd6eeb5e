"""Scripted demonstrators, for the default MiniWoB++ tasks, the shop's and the tracker's: what imitation warms up with.

Each is a rule from (goal, page text) to the next action, and reads nothing that the policy does not read. It looks
only at the page as it is now (what is filled, what is checked), so it also knows the way on from somebody else's
mistake."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from webagent_core.tasks.moves import Element, Move, click, elements, named, of_kind, quoted, select, type_into, wait
from webagent_core.tasks.shop_demonstrations import SHOP_DEMONSTRATORS
from webagent_core.tasks.tracker_demonstrations import TRACKER_DEMONSTRATORS


def _press_quoted(goal: str, page: list[Element]) -> Move:
    return click(named(page, quoted(goal)[0], "button", "link", "clickable"))


def _press_one(goal: str, page: list[Element]) -> Move:
    return click(named(page, "ONE"))


def _tab(goal: str, page: list[Element]) -> Move:
    return click(named(page, re.search(r"Tab #\d+", goal).group(), "tab"))


def _dialog_button(goal: str, page: list[Element]) -> Move:
    wanted = quoted(goal)[0]
    return click(named(page, "Close" if wanted == "x" else wanted, "button"))


def _expand_and_submit(goal: str, page: list[Element]) -> Move:
    section = next(element for element in page if element.name.startswith("Section"))
    return click(section if " expanded" not in section.state else named(page, "Submit"))


def _check_and_submit(goal: str, page: list[Element]) -> Move:
    """Unticks what is wrong, then ticks in the goal's order: the next name is the one after the last ticked."""
    wanted = re.match(r"Select (.*) and click Submit", goal).group(1).split(", ")
    boxes = of_kind(page, "checkbox", "radio")
    wrong = [box for box in boxes if box.kind == "checkbox" and box.checked and box.name not in wanted]
    missing = [box for name in wanted for box in boxes if box.name == name and not box.checked]
    return click(next(iter(wrong + missing), None) or named(page, "Submit", "button"))


def _choose_and_submit(goal: str, page: list[Element]) -> Move:
    wanted = re.match(r"Select (.*) from the list and click Submit", goal).group(1)
    field = of_kind(page, "select")[0]
    if field.value == wanted:
        return click(named(page, "Submit", "button"))
    return select(field, wanted)


def _fill(page: list[Element], wanted: list[str], submit: str) -> Move:
    for field, text in zip(of_kind(page, "input text", "input password"), wanted, strict=True):
        if field.value != text:
            return type_into(field, text)
    return click(named(page, submit, "button"))


def _enter_text(goal: str, page: list[Element]) -> Move:
    return _fill(page, quoted(goal)[:1], "Submit")


def _log_in(goal: str, page: list[Element]) -> Move:
    return _fill(page, quoted(goal), "Login")


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


DEMONSTRATED = DEMONSTRATORS | SHOP_DEMONSTRATORS | TRACKER_DEMONSTRATORS


def check_demonstrated(name: str) -> str:
    """Return `name`, or raise ValueError if nobody can demonstrate that task."""
    if name not in DEMONSTRATED:
        raise ValueError(
            f"task {name!r} has no demonstrator to warm up with (policy.warm_up=null does without); there are "
            f"{', '.join(sorted(DEMONSTRATED))}"
        )
    return name


def demonstrate(task: str, goal: str, observation: str, mistakes: float, rng: random.Random) -> str:
    """The demonstrator's response. Where that is a click, with probability `mistakes` one on the page's last element.

    That is an impatient hand: it presses Submit before the boxes are ticked, or the nearest button. One habit that all
    tasks share, and not a random choice, which would teach a small policy to mix names up; and of clicks alone, lest
    unlearning it teaches a small policy to type where it should click. While a page does not show what the goal speaks
    of, it waits.

    Raises:
        KeyError: there is no demonstrator for `task`.
    """
    page, demonstrator = elements(observation), DEMONSTRATED[task]
    try:
        move = demonstrator(goal, page)
    except LookupError:  # the page is still on its way, from a server that has much to do
        move = wait()
    if rng.random() < mistakes and move.action.name == "click":
        move = click(page[-1])
    return move.response()
