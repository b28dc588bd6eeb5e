"""Made-up pages: endless practice in the one skill that every web task takes, acting on what an instruction names.

A page here is a few lines in the notation of browser/observe.js with names drawn from a vocabulary or spelled at
random, and an instruction says what to do with one of them. Names mean nothing and ids are drawn at random, so the
only way to be right is to look the name up and copy the id after it. No task's own wording is used: those are learned
in warm-up."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from webagent_core.episode.actions import Action
from webagent_core.tasks.demonstrations import Element, Move

_PRESSED = ("button", "link", "clickable", "tab")
_TICKED = ("checkbox", "radio")
_FILLED = ("input text", "input password", "textarea")
_LETTERS = string.ascii_letters + string.digits


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The words among a tokenizer's tokens, sorted."""
    return sorted(token for token in tokenizer.get_vocab() if re.fullmatch(r"[A-Za-z]{2,}", token))


class MadeUpPages:
    """`sample()` gives (messages, response). The same seed gives the same sequence.

    Args:
        words: what names are made of, besides random spellings.
        largest: most elements on a page.
    """

    def __init__(self, words: Sequence[str], seed: int, largest: int = 9) -> None:
        self.words = list(words)
        self.rng = random.Random(seed)
        self.largest = largest

    def sample(self) -> tuple[list[dict], str]:
        rng = self.rng
        kind = rng.choice(("press", "press", "press", "follow", "follow", "fill", "choose", "tick", "tick", "form"))
        goal, lines, move, done = getattr(self, f"_{kind}")()
        for _ in range(rng.choice((0, 0, 1, 2))):
            lines.insert(rng.randrange(len(lines) + 1), self._prose())
        messages = [{"role": "user", "content": f"Task: {goal}"}]
        for response in done:
            messages[-1]["content"] += "\nSimplified HTML" if messages[-1]["content"] else "Simplified HTML"
            messages += [{"role": "assistant", "content": response}, {"role": "user", "content": ""}]
        page = "\n".join(lines)
        messages[-1]["content"] += ("\n" if messages[-1]["content"] else "") + page
        return messages, move.response()

    # --- names

    def _name(self) -> str:
        rng = self.rng
        if rng.random() < 0.35:
            return self._spelling()
        name = " ".join(rng.choice(self.words) for _ in range(rng.choice((1, 1, 1, 2))))
        return name + rng.choice(("", "", "", "", ",", ".", f" #{rng.randint(1, 9)}"))

    def _spelling(self) -> str:
        return "".join(self.rng.choice(_LETTERS) for _ in range(self.rng.randint(1, 7)))

    def _spelled(self, count: int) -> list[str]:
        """`count` names without words in them."""
        names: set[str] = set()
        while len(names) < count:
            names.add(self._spelling())
        return self.rng.sample(sorted(names), count)

    def _names(self, count: int) -> list[str]:
        names: list[str] = []
        if self.rng.random() < 0.15:  # names that differ by a number alone
            stem = self.rng.choice(self.words)
            return [f"{stem} #{number + 1}" for number in range(count)]
        alike = self.rng.random() < 0.3  # names that differ by case or punctuation alone
        while len(names) < count:
            name = self._name()
            if alike and names and self.rng.random() < 0.5:
                name = self._changed(self.rng.choice(names))
            if name not in names:
                names.append(name)
        return names

    def _changed(self, name: str) -> str:
        bare = name.rstrip(",.")
        return self.rng.choice((bare, f"{bare},", f"{bare}.", bare.swapcase()[:1] + bare[1:]))

    def _ids(self, count: int) -> list[str]:
        if self.rng.random() < 0.5:
            return [str(number + 1) for number in range(count)]
        return [str(number) for number in sorted(self.rng.sample(range(1, 40), count))]

    def _prose(self, names: Sequence[str] = ()) -> str:
        """A few words; among them, now and then, one of `names`, which stands there without an id."""
        rng = self.rng
        words = [rng.choice(self.words) + rng.choice(("", "", "", ",", ".")) for _ in range(rng.randint(1, 7))]
        if names and rng.random() < 0.3:
            words.insert(rng.randrange(len(words) + 1), rng.choice(names))
        return " ".join(words)

    def _said(self, name: str) -> str:
        return f'"{name}"' if self.rng.random() < 0.6 else name

    @staticmethod
    def _line(element: Element) -> str:
        return f"{element.name} {element.id} <{element.kind}>{element.state}"

    def _page(self, kinds: Sequence[str], least: int = 2) -> list[Element]:
        count = self.rng.randint(least, self.largest)
        names, ids = self._names(count), self._ids(count)
        one_kind = self.rng.choice(kinds) if self.rng.random() < 0.5 else None
        elements = []
        for name, id in zip(names, ids, strict=True):
            kind = one_kind or self.rng.choice(kinds)
            state = f' = "{self._name()}"' if kind in _FILLED and self.rng.random() < 0.3 else ""
            elements.append(Element(name, id, kind, state))
        return elements

    def _lines(self, elements: Sequence[Element]) -> list[str]:
        """The page's text. Half of the pages say a field's name once more in front of it, as labels do."""
        labelled, lines = self.rng.random() < 0.5, []
        for element in elements:
            if labelled and element.kind in _FILLED + _TICKED and element.name != "unnamed":
                lines.append(element.name)
            lines.append(self._line(element))
        return lines

    # --- kinds of instruction: (goal, lines of the page, right move, responses given before)

    def _press(self):
        rng = self.rng
        page = self._page(_PRESSED + (("input text", "checkbox") if rng.random() < 0.3 else ()))
        target = rng.choice(page)
        goal = rng.choice(
            ("Press {}.", "Open {} now.", "Go for {} here.", "Use the one called {}.", "Now take {} and go on.")
        )
        return (
            goal.format(self._said(target.name)),
            self._lines(page),
            Move(target, Action("click", element=target.id)),
            [],
        )

    def _follow(self):
        """Press one of the links in running text."""
        page = self._page(_PRESSED)
        target, names, lines = self.rng.choice(page), [e.name for e in page], []
        for element in page:
            if self.rng.random() < 0.7:
                lines.append(self._prose(names))
            lines.append(self._line(element))
        goal = self.rng.choice(("Follow {}.", "Go to {} in the text.", "Here it is about {}."))
        return goal.format(self._said(target.name)), lines, Move(target, Action("click", element=target.id)), []

    def _fill(self):
        page = self._page(_FILLED, least=1)
        target, text = self.rng.choice(page), self._name()
        goal = self.rng.choice(("Put {text} in {name}.", "{name} is {text}.", "Write {text} as the {name}."))
        goal = goal.format(text=f'"{text}"', name=self._said(target.name))
        return goal, self._lines(page), Move(target, Action("type", element=target.id, text=text)), []

    def _choose(self):
        options = self._names(self.rng.randint(2, self.largest))
        wanted = self.rng.choice(options)
        name, id = self.rng.choice(("unnamed", self._name())), self._ids(1)[0]
        state = f' = "{options[0]}" of ' + " ".join(f'"{option}"' for option in options)
        target = Element(name, id, "select", state)
        goal = self.rng.choice(("Choose {}.", "Take {} of these.", "It should be {}.")).format(self._said(wanted))
        return goal, [self._line(target)], Move(target, Action("select", element=id, option=wanted)), []

    def _tick(self):
        """Tick what is named and not ticked yet, from the top; then press the button at the end."""
        rng = self.rng
        kind, count = rng.choice(("checkbox", *_TICKED)), rng.randint(2, self.largest - 2)
        names, ids = self._names(count), self._ids(count + 1)
        if rng.random() < 0.5:
            names = self._spelled(count)
        wanted = [name for name in names if rng.random() < 0.5] if kind == "checkbox" else [rng.choice(names)]
        ticked = wanted[: rng.randint(0, len(wanted))]
        boxes = [Element(n, i, kind, " checked" if n in ticked else "") for n, i in zip(names, ids, strict=False)]
        end = Element(self._name(), ids[-1], "button", "")
        goal = f"Tick {', '.join(wanted) or 'none'}, then {self._said(end.name)}."
        missing = [box for box in boxes if box.name in wanted and not box.state]
        target = missing[0] if missing else end
        done = [Move(b, Action("click", element=b.id)).response() for b in boxes if b.state]
        return goal, self._lines([*boxes, end]), Move(target, Action("click", element=target.id)), done

    def _form(self):
        """Fill the named fields from the top, then press the button."""
        rng = self.rng
        count = rng.randint(1, 3)
        names, ids = self._names(count), self._ids(count + 1)
        if rng.random() < 0.4:
            names = ["unnamed"] * count
        texts = [self._name() for _ in names]
        filled = rng.randint(0, count)
        fields = [
            Element(name, id, rng.choice(_FILLED), f' = "{text}"' if index < filled else "")
            for index, (name, id, text) in enumerate(zip(names, ids, texts, strict=False))
        ]
        end = Element(self._name(), ids[-1], "button", "")
        goal = "Fill in " + ", then ".join(f'"{text}"' for text in texts) + f", then {self._said(end.name)}."
        moves = [Move(f, Action("type", element=f.id, text=t)) for f, t in zip(fields, texts, strict=True)]
        moves.append(Move(end, Action("click", element=end.id)))
        done = [move.response() for move in moves[:filled]]
        return goal, self._lines([*fields, end]), moves[filled], done
