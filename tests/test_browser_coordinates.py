"""Actions at points on real Chromium: what each of them does to a page that writes down what it was done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest
from conftest import Site

from webagent_core.browser.errors import ActionFailed
from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import Action, CoordinateSpace
from webagent_core.episode.contexts import Budget, PlaceholderContext, UITarsContext
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.runner import EpisodeLimits, EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus
from webagent_core.tasks.task import Outcome, Task

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = """<style>* { margin: 0 } #pad, #box { position: absolute; width: 200px; height: 100px; background: silver }
#box { left: 300px; overflow: scroll } input { position: absolute; top: 200px } #tall { height: 5000px }</style>
<div id=pad></div><div id=box><div style="height: 2000px"></div></div>
<form onsubmit="log.push('sent ' + this.q.value); return false"><input name=q></form><div id=tall></div>
<script>var log = [];
for (const type of ["mousedown", "mouseup", "click", "dblclick", "contextmenu"])
  document.getElementById("pad").addEventListener(type, e => log.push(`${type} ${e.button} ${e.clientX} ${e.clientY}`));
document.addEventListener("keydown", e => log.push(
  `${e.ctrlKey ? "ctrl " : ""}${e.shiftKey ? "shift " : ""}${e.key}`));</script>"""


async def done_to(pool: BrowserPool, site: Site, *actions: Action) -> list[str]:
    """What the page wrote down."""
    async with pool.page() as page:
        await page.goto(site.page("points", BODY))
        for action in actions:
            assert await page.act(action) is None
        return await page.evaluate("log")


async def test_clicks_land_on_their_point(pool: BrowserPool, site: Site):
    log = await done_to(pool, site, Action("click", x=7, y=90))
    assert log == ["mousedown 0 7 90", "mouseup 0 7 90", "click 0 7 90"]
    log = await done_to(pool, site, Action("double_click", x=150, y=20))
    assert log.count("click 0 150 20") == 2 and log[-1] == "dblclick 0 150 20"
    log = await done_to(pool, site, Action("right_click", x=150, y=20))
    assert log == ["mousedown 2 150 20", "contextmenu 2 150 20", "mouseup 2 150 20"]


async def test_a_drag_presses_at_its_first_point_and_releases_at_its_second(pool: BrowserPool, site: Site):
    log = await done_to(pool, site, Action("drag", x=10, y=10, x2=120.5, y2=60))
    assert log[0] == "mousedown 0 10 10" and "mouseup 0 120 60" in log


async def test_text_goes_into_what_has_the_focus(pool: BrowserPool, site: Site):
    focus = Action("click", x=50, y=210)
    log = await done_to(pool, site, focus, Action("type", text="a\u6771!", enter=True))
    assert log == ["a", "!", "Enter", "sent a\u6771!"]
    log = await done_to(pool, site, focus, Action("type", text="x" * 5000), Action("hotkey", keys=("enter",)))
    assert log == ["Enter", "sent " + "x" * 5000]  # put in at once


async def test_hotkeys_are_pressed_together(pool: BrowserPool, site: Site):
    focus, text = Action("click", x=50, y=210), Action("type", text="old")
    everything, plus = Action("hotkey", keys=("ctrl", "a")), Action("hotkey", keys=("ctrl", "+"))
    log = await done_to(pool, site, focus, text, everything, Action("type", text="new", enter=True))
    assert log[3:5] == ["ctrl Control", "ctrl a"] and log[-1] == "sent new"
    log = await done_to(pool, site, plus, Action("hotkey", keys=("shift", "pagedown")))
    assert log == ["ctrl Control", "ctrl +", "shift Shift", "shift PageDown"]


async def test_an_unknown_key_is_told_to_the_policy(pool: BrowserPool, site: Site):
    async with pool.page() as page:
        await page.goto(site.page("points", BODY))
        with pytest.raises(ActionFailed, match="there is no key banana"):
            await page.act(Action("hotkey", keys=("ctrl", "banana")))
        await page.act(Action("hotkey", keys=("a",)))
        assert await page.evaluate("log") == ["a"]  # no key is still held down


async def test_scrolling_moves_what_is_under_the_point(pool: BrowserPool, site: Site):
    async with pool.page() as page:
        await page.goto(site.page("points", BODY))
        for action, what in (
            (Action("scroll", x=400, y=50, direction="down"), "document.getElementById('box').scrollTop > 50"),
            (Action("scroll", x=700, y=400, direction="down"), "scrollY > 100"),
            (Action("scroll", x=700, y=400, direction="up"), "scrollY === 0"),
        ):
            await page.act(action)
            end = time.monotonic() + 3  # the browser does not say when it has scrolled
            while not (moved := await page.evaluate(what)) and time.monotonic() < end:
                await asyncio.sleep(0.02)
            assert moved, action
        assert page.viewport == (1280, 720)


async def test_a_wait_of_zero_does_not_wait(pool: BrowserPool, site: Site):
    async with pool.page() as page:
        started = time.monotonic()
        await page.act(Action("wait", seconds=0.0))
        assert time.monotonic() - started < 0.5
        await page.act(Action("wait"))
        assert time.monotonic() - started >= 1.0


# --- Episodes ---


@dataclass
class Pages:
    """A task set whose tasks are all one page; a click on its middle third ends them."""

    url: str
    unread: str | None = None

    def hosts_of(self, task: Task) -> None:
        return None

    async def open(self, page: WebPage, task: Task) -> str:
        await page.goto(self.url)
        return "Click in the middle."

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        return Outcome(**(await page.evaluate("() => window.outcome ?? { done: false }")))


MIDDLE = """<style>body { margin: 0 }</style><p>READ</p><div style="position: fixed; background: teal; left: 40vw;
top: 40vh; width: 20vw; height: 20vh" onclick="window.outcome = {done: true, reward: 1}"></div>"""


async def test_an_episode_is_played_at_points_whatever_the_size_of_the_picture(pool: BrowserPool, site: Site):
    pages = Pages(site.page("middle", MIDDLE.replace("READ", "")))
    for space, max_pixels, miss, hit in (
        (CoordinateSpace(), None, "(100,100)", "(500,500)"),
        (CoordinateSpace("pixel"), None, "(100,100)", "(640,360)"),
        (CoordinateSpace("pixel"), 320 * 180, "(100,20)", "(160,90)"),
        (CoordinateSpace("resized_abs", max_pixels=1_003_520), 640 * 360, "(100,100)", "(322,182)"),
    ):
        answers = [f"Action: click(start_box='{point}')" for point in ("(9999,1)", miss, hit)]
        chats = []

        async def says(messages: list[dict], answers=answers, chats=chats) -> Response:
            chats.append(messages)
            return Response(answers.pop(0))

        runner = EpisodeRunner(pool, pages, UITarsContext(max_pixels=max_pixels), coordinates=space)
        trajectory = await runner.run(Task("site/middle", 0), says)
        assert trajectory.success and [step.action is None for step in trajectory.steps] == [True, False, False]
        assert "must lie in 0 to" in trajectory.steps[0].error and len(pictures_of(chats[-1])) == 3
        width, height = pictures_of(chats[-1])[-1].size
        assert (width, height) == (1280, 720) if max_pixels is None else width * height <= max_pixels
        assert trajectory.steps[2].action.x == float(hit[1:4])  # the policy's own number, not the page's


async def test_a_budget_cuts_the_chat_or_ends_the_episode_and_both_are_on_record(pool: BrowserPool, site: Site):
    def words(messages: list[dict]) -> int:
        return sum(len(message["content"].split()) for message in messages)

    async def waits(messages: list[dict]) -> Response:
        assert words(messages) <= 60
        return Response("I will " + "wait and " * 20 + "\nAction: wait(0)")

    pages = Pages(site.page("long", MIDDLE.replace("READ", "<p>word</p>" * 100)))
    runner = EpisodeRunner(pool, pages, PlaceholderContext(), EpisodeLimits(max_steps=3), budget=Budget(words, 60))
    trajectory = await runner.run(Task("site/long", 0), waits)
    assert trajectory.exit_status is ExitStatus.STEP_LIMIT
    assert "lines of the page" in trajectory.steps[0].cut and "the oldest 1 of 2 steps" in trajectory.steps[2].cut
    runner.budget = Budget(words, 10)
    trajectory = await runner.run(Task("site/long", 0), waits)
    assert trajectory.exit_status is ExitStatus.CONTEXT_OVERFLOW and trajectory.valid and trajectory.reward == 0.0
    assert "10 fit" in trajectory.detail and len(trajectory.steps) == 1


async def test_a_runner_refuses_what_cannot_work_together(pool: BrowserPool):
    class Own:
        def messages(self, goal, steps, observation):
            return []

    with pytest.raises(ValueError, match="not allowed with a budget: a ContextManager"):
        EpisodeRunner(pool, None, Own(), budget=Budget(len, 5))
    with pytest.raises(ValueError, match="screenshots = False is not allowed with coordinates"):
        EpisodeRunner(pool, None, UITarsContext(), screenshots=False, coordinates=CoordinateSpace())
