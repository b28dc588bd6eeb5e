"""Attempts at made-up pages, right and wrong ones: practice in what every outcome model does, comparing what was asked
for with what was done.

The instructions are those of policy/made_up_pages.py, none of them a task's own wording. Half of the attempts do what
the instruction says; the others press something else, leave a box out, tick one too many or type with a slip. What was
typed, ticked and pressed is all that tells them apart: names mean nothing.
"""

from __future__ import annotations

from dataclasses import replace

from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.policy.made_up_pages import MadeUpPages
from webagent_core.tasks.demonstrations import Element

FIELDS = ("input text", "input password", "textarea")


class MadeUpAttempts(MadeUpPages):
    """`attempt()` gives a trajectory with reward 1 or 0. The same seed gives the same sequence."""

    def attempt(self) -> Trajectory:
        pressing = ("press", "press", "follow")
        kind = self.rng.choice((*pressing, "fill", "tick", "form") if self.largest > 3 else pressing)
        right = self.rng.random() < 0.5
        goal, page, moves = getattr(self, f"_attempt_to_{kind}")(right)
        return self._played(goal, page, moves, right)

    def _played(self, goal: str, page: list[Element | str], moves: list[Action], right: bool) -> Trajectory:
        """`moves` made on `page`, whose elements show what was typed and ticked."""
        steps = []
        for move in moves:
            steps.append(Step("", self._text(page), [], str(move), move))
            page = [line if isinstance(line, str) or line.id != move.element else _after(line, move) for line in page]
        end = FinalPage("", self._text(page))
        return Trajectory(
            "made-up", 0, "made-up", goal, steps, exit_status=ExitStatus.ANSWERED, reward=float(right), final=end
        )

    def _text(self, page: list[Element | str]) -> str:
        return "\n".join(line if isinstance(line, str) else self._line(line) for line in page)

    # --- kinds of attempt: (goal, lines of the page, moves)

    def _attempt_to_press(self, right: bool):
        page = self._page(("button", "link", "clickable", "tab"))
        goal = self.rng.choice(("Press {}.", "Open {} now.", "Go for {} here.", "Use the one called {}."))
        return self._pressed(goal, page, list(page), right)

    def _attempt_to_follow(self, right: bool):
        page = self._page(("link", "clickable"))
        names = [element.name for element in page]
        lines: list[Element | str] = []
        for element in page:
            lines += [self._prose(names), element] if self.rng.random() < 0.7 else [element]
        return self._pressed(self.rng.choice(("Follow {}.", "Go to {} in the text.")), page, lines, right)

    def _pressed(self, goal: str, page: list[Element], lines: list[Element | str], right: bool):
        """One of `page` is asked for; now and then a field is clicked a few times before something is pressed."""
        rng, target = self.rng, self.rng.choice(page)
        others = [element for element in page if element is not target]
        moves = [_click(target if right else rng.choice(others))]
        if self.largest > 3 and rng.random() < 0.3:
            field = Element(rng.choice(("unnamed", self._name())), str(len(page) + 40), "input text", "")
            lines.insert(rng.randrange(len(lines) + 1), field)
            astray = [_click(field)] * rng.randint(1, 5)
            # An attempt may also end before anything was pressed.
            moves = astray + moves if right or rng.random() < 0.7 else astray
        return goal.format(self._said(target.name)), lines, moves

    def _attempt_to_fill(self, right: bool):
        rng, page = self.rng, self._page(FIELDS, least=2)
        page = [replace(element, state="") for element in page]
        target, text = rng.choice(page), self._name()
        goal = rng.choice(("Put {text} in {name}.", "{name} is {text}.", "Write {text} as the {name}."))
        goal = goal.format(text=f'"{text}"', name=self._said(target.name))
        if not right and rng.random() < 0.5:
            target = rng.choice([element for element in page if element is not target])
        elif not right:
            text = self._slipped(text)
        return goal, list(page), [_type(target, text)]

    def _attempt_to_tick(self, right: bool):
        """Tick what is named, then press the button at the end."""
        rng = self.rng
        count = rng.randint(2, self.largest - 2)
        names = self._spelled(count) if rng.random() < 0.5 else self._names(count)
        ids = self._ids(count + 1)
        kind = rng.choice(("checkbox", "checkbox", "radio"))
        boxes = [Element(name, id, kind, "") for name, id in zip(names, ids, strict=False)]
        wanted = [box for box in boxes if rng.random() < 0.4] if kind == "checkbox" else [rng.choice(boxes)]
        end = Element(self._name(), ids[-1], "button", "")
        goal = f"Tick {', '.join(box.name for box in wanted) or 'none'}, then {self._said(end.name)}."
        ticked, others = list(wanted), [box for box in boxes if box not in wanted]
        if not right:
            leave_out = bool(wanted) and (rng.random() < 0.7 or not others)
            if leave_out:
                ticked.remove(rng.choice(ticked))
            if others and (not leave_out or rng.random() < 0.4):
                ticked.append(rng.choice(others))
        return goal, [*boxes, end], [*map(_click, ticked), _click(end)]

    def _attempt_to_form(self, right: bool):
        """Fill fields from the top, then press the button."""
        rng, count = self.rng, self.rng.randint(1, 3)
        names = ["unnamed"] * count if rng.random() < 0.4 else self._names(count)
        ids, texts = self._ids(count + 1), [self._name() for _ in range(count)]
        fields = [Element(name, id, rng.choice(FIELDS), "") for name, id in zip(names, ids, strict=False)]
        end = Element(self._name(), ids[-1], "button", "")
        goal = "Fill in " + ", then ".join(f'"{text}"' for text in texts) + f", then {self._said(end.name)}."
        typed = list(texts)
        if not right:
            slip = rng.randrange(count)
            match rng.choice(("slip", "slip", "leave out", "swap" if len(set(texts)) > 1 else "slip")):
                case "slip":
                    typed[slip] = self._slipped(typed[slip])
                case "leave out":
                    typed[slip] = ""
                case "swap":
                    typed.reverse()
                    if typed == texts:
                        typed[0], typed[1] = typed[1], typed[0]
        moves = [_type(field, text) for field, text in zip(fields, typed, strict=True) if text]
        return goal, [*fields, end], [*moves, _click(end)]

    def _slipped(self, text: str) -> str:
        """Another text: a letter more, less or in the other case, or something else altogether."""
        at = self.rng.randrange(len(text))
        letter = self.rng.choice("abcdefghijklmnopqrstuvwxyz")
        changed = self.rng.choice(
            (text + letter, text + self._spelling(), text[:at] + text[at].swapcase() + text[at + 1 :],
             text[:at] + text[at + 1 :], text[:at] + letter + text[at:], self._name())
        )  # fmt: skip
        return changed if changed.strip() and changed != text else text + letter


def _click(element: Element) -> Action:
    return Action("click", element=element.id)


def _type(element: Element, text: str) -> Action:
    return Action("type", element=element.id, text=text)


def _after(element: Element, move: Action) -> Element:
    if move.name == "type":
        return replace(element, state=f' = "{move.text}"')
    return replace(element, state=" checked") if element.kind in ("checkbox", "radio") else element
