"""MiniWoB++ from the `miniwob` package: its real pages, driven through our own browser instead of Selenium.

Success is the task's raw reward = 1. The package also knows a reward that decays with the wall clock and partial
rewards above 0; neither is a success here, because a slow model is not a wrong one and half a form is not a form.
"""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from webagent_core.browser.errors import PageNotReady
from webagent_core.browser.page import WebPage
from webagent_core.tasks.page_server import PageServer
from webagent_core.tasks.task import Outcome, Task

PREFIX = "miniwob/"

# Pages that are not the same twice for the same seed (measured on all 130: they read the clock or move by themselves).
NOT_REPRODUCIBLE = frozenset({"chase-circle", "moving-items", "simon-says", "stock-market"})

# The page's own limit is meant for people's clocks (7 to 30 s); the runner has its own. Above 2**31 ms the page's timer
# overflows and ends the episode at once.
_EPISODE_MS = 1_000_000

# The cover appears with the page's onload handler; the problem is made by the seeded generator right here.
_START = """async ([seed, limit, patience]) => {
  const end = performance.now() + patience;
  while (typeof core === "undefined" || !core.cover_div || document.readyState !== "complete") {
    if (performance.now() > end) return { error: "the page has no MiniWoB task" };
    await new Promise(requestAnimationFrame);
  }
  core.EPISODE_MAX_TIME = limit;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  while (!WOB_TASK_READY) {
    if (performance.now() > end) return { error: "the task did not become ready" };
    await new Promise(requestAnimationFrame);
  }
  const goal = core.getUtterance();
  return { goal: typeof goal === "string" ? goal : goal.utterance };
}"""
# A policy may have walked off the task's page (goto, back): the task is then simply not done.
_STATUS = """() => typeof WOB_DONE_GLOBAL === "undefined"
  ? { done: false }
  : { done: WOB_DONE_GLOBAL, raw: WOB_RAW_REWARD_GLOBAL, reason: WOB_REWARD_REASON }"""


def html_folder() -> Path:
    """Folder of the pages inside the installed package, found without importing it (that would pull in Selenium)."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the package miniwob is not installed: pip install miniwob==1.1.0")
    return Path(spec.submodule_search_locations[0]) / "html"


def all_tasks() -> list[str]:
    """Names of all of the package's tasks, e.g. "miniwob/click-button"."""
    return [PREFIX + page.stem for page in sorted((html_folder() / "miniwob").glob("*.html"))]


def check_name(name: str) -> str:
    """Return `name`, or raise ValueError naming what is close to it."""
    known = all_tasks()
    if name not in known:
        close = ", ".join(difflib.get_close_matches(name, known, n=3) or known[:3])
        raise ValueError(f"task {name!r} is unknown; close to it: {close} ({len(known)} tasks: `webagent tasks`)")
    return name


class MiniWoB:
    """The task set: `with MiniWoB() as tasks` serves the pages; tasks are "miniwob/<page>" with any seed."""

    unread = "#query, #reward-display, #click-canvas, #sync-task-cover"
    # The pages keep their state in their document alone, so an emptied page is as good as a new context.
    isolation = "page"
    viewport = (160, 210)
    # The score display gives away reward and clock, in text and in pixels.
    init_script = """addEventListener("DOMContentLoaded", () => {
      const style = document.createElement("style");
      style.textContent = "#reward-display, #click-canvas { display: none !important; }";
      document.head.append(style);
    });"""

    def __init__(self) -> None:
        self._server = PageServer(html_folder())

    def __enter__(self) -> MiniWoB:
        self._server.__enter__()
        self.allowed_hosts = (self._server.host,)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def hosts_of(self, task: Task) -> None:
        return None

    async def open(self, page: WebPage, task: Task) -> str:
        await page.goto(f"http://{self._server.host}/miniwob/{task.name.removeprefix(PREFIX)}.html")
        patience = page.limits.call_seconds * 800  # ms: the page has to give up before the call does
        started = await page.evaluate(_START, [str(task.seed), _EPISODE_MS, patience])
        if "error" in started:
            raise PageNotReady(f"{task.group}: {started['error']}")
        return started["goal"]

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        status = await page.evaluate(_STATUS)
        if not status["done"]:
            return Outcome(done=False)
        detail = f"raw reward {status['raw']:g}" + (f", {status['reason']}" if status["reason"] else "")
        return Outcome(done=True, reward=1.0 if status["raw"] == 1 else 0.0, detail=detail)
