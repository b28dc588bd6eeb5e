"""What of a trajectory a judge or an outcome model is shown: pages, actions, answer."""

from __future__ import annotations

import re

from webagent_core.episode.trajectory import FinalPage, Step, Trajectory
from webagent_core.rewards.prompts import Fenced


def final_page(trajectory: Trajectory) -> FinalPage | None:
    """The page as it was at the first finish; None where the episode saw no page.

    Where the runner recorded none, it is what the last step saw. That is the same page if the step was a `stop`, which
    changes nothing; after any other action the page may since have changed, and nobody looked.
    """
    if trajectory.final is not None or not trajectory.steps:
        return trajectory.final
    last = trajectory.steps[-1]
    return FinalPage(url=last.url, text=last.observation, screenshot=last.screenshot)


def pages(trajectory: Trajectory, most: int | None = None, *, vision: bool = True) -> list[Fenced | bytes]:
    """The last `most` pages in order of time: screenshots, or the text of a page that has none or without `vision`."""
    seen: list[tuple[str, bytes | None]] = [(step.observation, step.screenshot) for step in trajectory.steps]
    if trajectory.final is not None:
        seen.append((trajectory.final.text, trajectory.final.screenshot))
    first = len(seen) - min(most, len(seen)) if most is not None else 0
    return [
        screenshot if vision and screenshot is not None else Fenced(f"page {number}", text)
        for number, (text, screenshot) in enumerate(seen[first:], start=first + 1)
    ]


def actions(trajectory: Trajectory) -> Fenced:
    lines = [f"{number}. {describe(step)}" for number, step in enumerate(trajectory.steps, start=1)]
    return Fenced("actions", "\n".join(lines))


def answer(trajectory: Trajectory) -> Fenced:
    return Fenced("final answer", trajectory.answer or "")


def describe(step: Step) -> str:
    """The step in one line: its action, the name of the element that it is about, and what the page said to it."""
    if step.action is None:
        return f"no action ({step.error})"
    words = str(step.action)
    element = getattr(step.action, "element", None)
    if element is not None:
        named = re.search(rf"(?m)^(.*) {re.escape(element)} (<[^>]+>)", step.observation)
        words += f" on {named[1]} {named[2]}" if named else ""
    return words + (f" [{step.error}]" if step.error else "")
