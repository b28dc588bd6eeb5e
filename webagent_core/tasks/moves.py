"""What demonstrators are made of: a page's text read as elements, and the move to make on one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from webagent_core.episode.actions import Action

_LINE = re.compile(r"^(?P<name>.*) (?P<id>\d+) <(?P<kind>[^>]+)>(?P<state>.*)$")


@dataclass(frozen=True)
class Element:
    """One line of a page's text (see browser/observe.js), and the lines of plain text after it."""

    name: str
    id: str
    kind: str
    state: str
    after: list[str] = field(default_factory=list, compare=False)

    @property
    def value(self) -> str:
        found = re.match(r' = "([^"]*)"', self.state)
        return found.group(1) if found else ""

    @property
    def checked(self) -> bool:
        return self.state.startswith(" checked")


def elements(observation: str) -> list[Element]:
    page: list[Element] = []
    for line in observation.splitlines():
        if found := _LINE.match(line):
            page.append(Element(**found.groupdict()))
        elif page:
            page[-1].after.append(line)
    return page


@dataclass(frozen=True)
class Move:
    """An action and the element it is about; None where it is about none."""

    target: Element | None
    action: Action

    def response(self) -> str:
        """In the words the policy is to learn: the target restated, then the action on it."""
        nothing = "loading" if self.action.name == "wait" else "done"
        about = f"{self.target.name} {self.target.id}" if self.target else nothing
        return f"{about}\nAction: {self.action}"


def click(element: Element) -> Move:
    return Move(element, Action("click", element=element.id))


def type_into(element: Element, text: str) -> Move:
    return Move(element, Action("type", element=element.id, text=text))


def select(element: Element, option: str) -> Move:
    return Move(element, Action("select", element=element.id, option=option))


def stop(answer: str = "") -> Move:
    return Move(None, Action("stop", answer=answer))


def wait() -> Move:
    return Move(None, Action("wait"))


def named(page: list[Element], name: str, *kinds: str) -> Element:
    """The first element of that name (and kind); names are compared with case first, then without."""
    candidates = [element for element in page if not kinds or element.kind in kinds]
    for same in (lambda a, b: a == b, lambda a, b: a.lower() == b.lower()):
        for element in candidates:
            if same(element.name, name):
                return element
    raise LookupError(f"no {' or '.join(kinds) or 'element'} named {name!r} on the page")


def has(page: list[Element], name: str) -> bool:
    return any(element.name == name for element in page)


def of_kind(page: list[Element], *kinds: str) -> list[Element]:
    return [element for element in page if element.kind in kinds]


def quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def log_in(goal: str, page: list[Element], button: str) -> Move | None:
    """The next move to log in with the first two quoted words of the goal; None: there is no form for that.

    The fields are the first password's and the one before it; `button` is the name of what sends them.
    """
    passwords = of_kind(page, "input password")
    if not passwords:
        return None
    name, secret = quoted(goal)[:2]
    before = page[page.index(passwords[0]) - 1]
    for box, text in ((before, name), (passwords[0], secret)):
        if box.value != text:
            return type_into(box, text)
    return click(named(page, button, "input submit", "button"))
