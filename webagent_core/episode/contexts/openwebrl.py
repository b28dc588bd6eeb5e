"""OpenWebRL: one screenshot, all thoughts, and what the last action did to the page."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import CUT_HERE, ScreenshotContext, inert, task
from webagent_core.episode.trajectory import Step

_MOST_CHARACTERS = 200  # of the feedback


class OpenWebRLContext(ScreenshotContext):
    """OpenWebRL's rule (h_{i,t} of section 4.4): the newest screenshot, the text of all earlier thoughts, and one line
    of feedback that the environment reads off the change of the page's DOM: a text was put in, nothing changed.

    With less room the oldest thoughts go.
    """

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        thoughts = [f"{number}. {inert(self.thought(step))}" for number, step in enumerate(steps, 1)][less:]
        lines = [task(goal)]
        lines += ["Thoughts so far:", *thoughts] if thoughts else []
        lines += [f"Feedback: {feedback(steps[-1], page)}"] if steps else []
        earlier = [self.seen(step) for step in steps[max(0, len(steps) - self.history_screenshots + 1) :]]
        return self.chat(self.turn("\n".join(lines), *earlier, self.now(page, screenshot)))


def feedback(step: Step, page: str) -> str:
    """What the step's action did, in one line: what went wrong, or the first line that is new on the page.

    Of a page that was cut to fit, what is left is compared.
    """
    before, after = inert(step.observation).splitlines(), page.splitlines()
    known = set(before)
    if after[-1:] == [CUT_HERE]:
        before, after = before[: len(after) - 1], after[:-1]
    new = [line for line in after if line not in known]
    if step.error:
        said = step.error
    elif new:
        said = f"the page changed; new on it: {new[0]}"
    else:
        said = "the page did not change" if after == before else "the page changed; some of it is gone"
    return inert(" ".join(said[:_MOST_CHARACTERS].split()))
