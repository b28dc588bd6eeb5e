"""MiniWoB++ on its real pages: what makes a task, what counts as success, what the policy gets to see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from conftest import QUICK

from webagent_core.browser.page import Observation, WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import Action
from webagent_core.recipe import load_recipe
from webagent_core.tasks.miniwob import MiniWoB, all_tasks, check_name
from webagent_core.tasks.task import Outcome, Task

pytestmark = pytest.mark.asyncio(loop_scope="module")


def pool_for(miniwob: MiniWoB, viewport: tuple[int, int]) -> BrowserPool:
    return BrowserPool(
        pages=2,
        allowed_hosts=miniwob.allowed_hosts,
        isolation=miniwob.isolation,
        viewport=viewport,
        init_script=miniwob.init_script,
        limits=replace(QUICK, load_seconds=10, call_seconds=10),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pages(miniwob: MiniWoB) -> AsyncIterator[BrowserPool]:
    async with pool_for(miniwob, miniwob.viewport) as pool:
        yield pool


async def start(miniwob: MiniWoB, page: WebPage, name: str, seed: int) -> tuple[str, Observation]:
    goal = await miniwob.open(page, Task(f"miniwob/{name}", seed))
    await page.settle()
    return goal, await page.observe(skip=miniwob.unread)


async def id_of(page: WebPage, name: str, kind: str) -> str:
    lines = (await page.observe(skip=MiniWoB.unread)).text.splitlines()
    return next(line[len(name) :].split()[0] for line in lines if line.startswith(name + " ") and f"<{kind}>" in line)


async def test_the_same_seed_is_the_same_task_and_another_seed_another(miniwob, pages):
    async def play(name: str) -> None:
        seen = []
        for seed in (1, 1, 2, 3):
            async with pages.page() as page:
                goal, observation = await start(miniwob, page, name, seed)
                assert goal and observation.text, name
                seen.append((goal, observation.text))
        assert seen[0] == seen[1], name
        assert len(set(seen)) > 1, name

    defaults = load_recipe("webagent_r1").tasks.names
    assert len(defaults) >= 8
    await asyncio.gather(*(play(name.removeprefix("miniwob/")) for name in defaults))
    assert pages.launches == 1


@pytest.mark.slow
async def test_every_task_of_the_package_opens(miniwob, pages):
    queue = iter(all_tasks())

    async def open_next() -> list[str]:
        empty = []
        for name in queue:
            async with pages.page() as page:
                goal, _ = await start(miniwob, page, name.removeprefix("miniwob/"), 7)
                outcome = await miniwob.outcome(page)
                if not goal or outcome.done:
                    empty.append(name)
        return empty

    assert sum(await asyncio.gather(open_next(), open_next()), []) == []
    assert pages.launches == 1


async def test_a_name_that_is_unknown_brings_close_ones_on_one_line():
    assert len(all_tasks()) == 130
    assert check_name("miniwob/click-button") == "miniwob/click-button"
    for name, close in (("miniwob/click-buton", "miniwob/click-button"), ("xyz", "miniwob/")):
        with pytest.raises(ValueError, match=f"task '{name}' is unknown; close to it: {close}") as told:
            check_name(name)
        assert len(str(told.value).splitlines()) == 1


async def check_boxes(page: WebPage, goal: str, most: int) -> int:
    """Tick the first `most` of the boxes that the goal names, then submit. Returns how many it names."""
    wanted = goal.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
    for name in wanted[:most]:
        await page.act(Action("click", element=await id_of(page, name, "checkbox")))
    await page.act(Action("click", element=await id_of(page, "Submit", "button")))
    return len(wanted)


async def test_half_right_is_not_a_success(miniwob, pages):
    async with pages.page() as page:
        seed = 1
        goal, _ = await start(miniwob, page, "click-checkboxes", seed)
        while goal.count(",") < 2:
            seed += 1
            goal, _ = await start(miniwob, page, "click-checkboxes", seed)
        assert await check_boxes(page, goal, 2) > 2
        raw = await page.evaluate("WOB_RAW_REWARD_GLOBAL")
        outcome = await miniwob.outcome(page)
        assert raw < 1
        assert outcome.done and outcome.reward == 0.0
        assert f"raw reward {raw:g}" in outcome.detail


async def test_success_is_1_however_slow(miniwob, pages):
    async with pages.page() as page:
        goal, _ = await start(miniwob, page, "click-checkboxes", 2)
        assert await miniwob.outcome(page) == Outcome(done=False)
        await asyncio.sleep(0.5)
        await check_boxes(page, goal, 99)
        assert await page.evaluate("WOB_REWARD_GLOBAL") < 1  # what the package makes of half a second
        outcome = await miniwob.outcome(page)
        assert outcome == Outcome(done=True, reward=1.0, detail="raw reward 1")


async def test_a_wrong_answer_is_0(miniwob, pages):
    async with pages.page() as page:
        goal, observation = await start(miniwob, page, "click-button", 1)
        wanted = goal.split('"')[1]
        wrong = next(
            line for line in observation.text.splitlines() if "<button>" in line and not line.startswith(wanted)
        )
        await page.act(Action("click", element=wrong.split(" <")[0].split()[-1]))
        assert await page.evaluate("WOB_RAW_REWARD_GLOBAL") == -1
        outcome = await miniwob.outcome(page)
        assert (outcome.done, outcome.reward) == (True, 0.0)


async def test_away_from_its_page_a_task_is_open(miniwob, pages):
    async with pages.page() as page:
        await start(miniwob, page, "click-button", 1)
        await page.act(Action("goto", url=f"http://{miniwob.allowed_hosts[0]}/common/ui_utils.js"))
        assert await miniwob.outcome(page) == Outcome(done=False)
        await page.act(Action("back"))
        with pytest.raises(Exception, match="no earlier page"):
            await page.act(Action("back"))


async def test_score_and_clock_are_seen_neither_in_text_nor_in_pixels(miniwob):
    async with pool_for(miniwob, (400, 300)) as pages, pages.page() as page:  # the task set's own window cuts them off
        _, observation = await start(miniwob, page, "click-button", 1)
        for words in ("Last reward", "Time left", "Episodes done", "START"):
            assert words not in observation.text
        hidden = """["#reward-display", "#click-canvas", "#sync-task-cover"]
          .every((part) => !document.querySelector(part)?.checkVisibility())"""
        assert await page.evaluate(hidden)
        before = await page.screenshot()
        await page.evaluate("display = document.querySelector('#reward-display'); display.textContent = 'Last: 1.00'")
        assert await page.screenshot() == before
        await page.evaluate("document.querySelectorAll('style').forEach(style => style.remove())")
        await page.evaluate("display.style.display = 'block'")
        assert await page.screenshot() != before  # unhidden, the same score shows
