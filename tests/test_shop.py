"""The shop: its tasks done by their demonstrators on real pages, a database an episode, what counts and what not."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from webagent_core.browser.page import PageLimits, WebPage
from webagent_core.episode.actions import parse_action
from webagent_core.episode.browser_rollout import open_runner
from webagent_core.episode.runner import EpisodeLimits, EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.recipe import load_recipe
from webagent_core.tasks.demonstrations import check_demonstrated, demonstrate
from webagent_core.tasks.lookup import check_tasks, task_set_of
from webagent_core.tasks.shop import SHOP, differences, facts_of, read_facts, task_of
from webagent_core.tasks.site import PEOPLE, Site
from webagent_core.tasks.task import Task

pytest.importorskip("oscar", reason="the shop is django-oscar: pip install 'webagent-rl[sites]'")

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATIENT = PageLimits(load_seconds=60, call_seconds=60, action_seconds=20, settle_seconds=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner() -> AsyncIterator[EpisodeRunner]:
    limits = EpisodeLimits(max_steps=15, seconds=600)
    async with open_runner(
        task_set=Site(SHOP), pages=4, limits=limits, page_limits=PATIENT, screenshots=False
    ) as runner:
        yield runner


Change = Callable[[str], str]


def as_it_is(words: str) -> str:
    return words


async def play(
    runner: EpisodeRunner, task: Task, *, goal: Change = as_it_is, change: Change = as_it_is, mistakes: float = 0.0
) -> Trajectory:
    """The demonstrator's episode, of another goal and with other responses where asked for."""
    pages, rng = [], random.Random(task.seed)
    told = goal(task_of(task.name.removeprefix("shop/"), task.seed)[1].goal)

    async def answer(chat: list[dict]) -> Response:
        return Response(change(demonstrate(task.name, told, pages[-1].text, mistakes, rng)))

    return await runner.run(task, answer, watch=pages.append)


async def walk(site: Site, page: WebPage, task: Task, steps: int = 15) -> list[str]:
    """The demonstrator's way on a page that is open already, up to where it stops; what was seen."""
    goal, seen = await site.open(page, task), []
    for _ in range(steps):
        await page.settle()
        seen.append((await page.observe()).text)
        action = parse_action(demonstrate(task.name, goal, seen[-1], 0.0, random.Random(0)))
        if action.name == "stop":
            break
        await page.act(action)
    return seen


# --- Tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_every_task_is_done_by_its_demonstrator_in_5_to_15_steps(runner):
    tasks = [Task(name, seed) for name in SHOP.all_tasks() for seed in (0, 1, 2)]
    for played in await asyncio.gather(*(play(runner, task) for task in tasks)):
        assert (played.exit_status, played.reward) == (ExitStatus.ANSWERED, 1.0), (played.group, played.detail)
        assert 5 <= len(played.steps) <= 15 and not any(step.error for step in played.steps)
    assert {check_demonstrated(task.name) for task in tasks} == set(SHOP.all_tasks())


@pytest.mark.slow
async def test_the_demonstrators_know_the_way_on_from_a_slip(runner):
    tasks = [Task(name, seed) for name in SHOP.all_tasks() for seed in (3, 4)]
    done = await asyncio.gather(*(play(runner, task, mistakes=0.1) for task in tasks))
    assert {played.exit_status for played in done} <= {ExitStatus.ANSWERED, ExitStatus.STEP_LIMIT}
    assert sum(played.reward for played in done) >= len(done) / 2


async def test_a_seed_fixes_the_task_and_seeds_differ():
    for name in SHOP.tasks:
        assert task_of(name, 7) == task_of(name, 7)
        goals = {task_of(name, seed)[1].goal for seed in range(50)}
        assert len(goals) > 30
        for seed in range(50):
            before, asked = task_of(name, seed)
            assert (differences(asked.state, facts_of(before)) == []) == (name == "read-order")
            assert differences(asked.state, facts_of(asked.state)) == []
            titles = [product.title for product in before.products]
            assert len(set(titles)) == len(titles) == 16


async def test_the_cheapest_is_cheaper_than_the_others():
    for seed in range(50):
        before, asked = task_of("compare", seed)
        which, category = re.search(r'the (cheapest|most expensive) product in "(\w+)"', asked.goal).groups()
        prices = {product.title: float(product.price) for product in before.of_category(category)}
        (title,) = asked.state.cart
        assert len(set(prices.values())) == 4
        assert prices[title] == (min if which == "cheapest" else max)(prices.values())


async def test_the_pages_show_the_state_of_the_seed(runner):
    played = await play(runner, Task("shop/read-order", 5))
    before, asked = task_of("read-order", 5)
    assert all(f"£{product.price}" in played.steps[0].observation for product in before.products)
    assert all(product.title in played.steps[0].observation for product in before.products)
    assert all(order.number in played.steps[5].observation for order in before.orders)
    assert played.answer == asked.answer and played.reward == 1.0


async def test_a_wrong_answer_product_or_quantity_is_a_failure(runner):
    """Demonstrated is what the goal, changed a little, would ask for."""
    answered, bought, counted = await asyncio.gather(
        play(runner, Task("shop/read-order", 3), change=lambda usual: re.sub(r"stop\(.*", 'stop("12")', usual)),
        play(runner, Task("shop/compare", 0), goal=lambda goal: goal.replace("cheapest", "most expensive")),
        play(runner, Task("shop/edit-cart", 0), goal=lambda goal: re.sub(r'to "\d+"', 'to "11"', goal)),
    )
    assert {played.exit_status for played in (answered, bought, counted)} == {ExitStatus.ANSWERED}
    assert [played.reward for played in (answered, bought, counted)] == [0.0, 0.0, 0.0]
    assert "the answer is" in answered.detail
    assert re.fullmatch(r"cart (\S+), (.+), 1 is not there; cart \1, (?!\2,).+, 1 is one too many", bought.detail)
    assert re.fullmatch(r"cart (\S+), (.+), 5 is not there; cart \1, \2, 11 is one too many", counted.detail)


async def test_more_than_what_was_asked_is_a_failure():
    _, asked = task_of("buy", 4)
    wanted, email = facts_of(asked.state), f"{asked.state.person}@shop.test"
    order = next(fact for fact in wanted if fact[0] == "order")
    for spoil in (
        {("account", "new@shop.test"): 1},
        {("cart", email, "Red mug", 1): 1},
        {("saved for later", email, "Red mug", 1): 1},
        {("review", email, "Red mug", 5, "Good", "Good"): 1},
        {order: 1},
        {order: -1},
    ):
        found = wanted.copy()
        found.update(spoil)
        assert len(differences(asked.state, found)) == 1


# --- A database an episode -------------------------------------------------------------------------------------------


async def test_episodes_at_the_same_time_have_states_of_their_own_and_nothing_is_asked_of_others(runner):
    """Two of one seed and one of another: what one of them buys, the others do not have."""
    site, task, other = runner.task_set, Task("shop/buy", 3), Task("shop/buy", 4)
    asked: set[str] = set()
    async with runner.pool.page() as buying, runner.pool.page() as idle, runner.pool.page() as second:
        buying.context.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        await site.open(idle, task)
        await site.open(second, other)
        await walk(site, buying, task)
        rewards = [(await site.outcome(page, "")).reward for page in (buying, idle, second)]
        found = [read_facts(site.folder_of(page) / "shop.sqlite3") for page in (buying, idle, second)]
    assert rewards == [1.0, 0.0, 0.0] and asked == {site.host}
    (same, bought), (elsewhere, _) = (task_of("buy", seed) for seed in (3, 4))
    assert found == [facts_of(bought.state), facts_of(same), facts_of(elsewhere)]


async def test_a_page_that_plays_again_begins_anew(runner):
    site, task = runner.task_set, Task("shop/edit-cart", 6)
    async with runner.pool.page() as page:
        first, again = [await walk(site, page, task, steps=5) for _ in range(2)]
        folder = site.folder_of(page)
        assert first == again and "Logout" in first[4] and "Logout" not in first[0]
        left = {path.name for path in folder.parent.iterdir()}
    assert left == {"empty.sqlite3", folder.name}  # the first one's is gone


async def test_without_an_episodes_header_there_is_nothing(runner):
    def status(episode: str) -> int:
        request = urllib.request.Request(f"http://{runner.task_set.host}/", headers={"X-Episode": episode})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    codes = [await asyncio.to_thread(status, episode) for episode in ("", "e999", "../empty", "empty.sqlite3")]
    assert codes == [404, 404, 404, 404]


# --- Settings --------------------------------------------------------------------------------------------------------


async def test_the_names_of_a_recipe_choose_the_shop():
    recipe = load_recipe("webagent_r1", overrides={"tasks.names": ["shop/buy", "shop/compare"]})
    check_tasks(recipe)
    chosen = task_set_of(recipe.tasks)
    assert isinstance(chosen, Site) and chosen.kind is SHOP
    for names, said in (
        (["shop/buy", "tracker/comment"], "tasks of one set at a time"),
        (["shop/by"], "task 'shop/by' is unknown; there are shop/buy, shop/compare"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            check_tasks(load_recipe("webagent_r1", overrides={"tasks.names": names}))


async def test_people_are_asked_for_with_their_passwords():
    asked = Counter(
        re.match(r'Log in as "(\w+)@shop.test" with the password "([\w-]+)"', task_of("buy", seed)[1].goal).groups()
        for seed in range(40)
    )
    assert set(asked) == set(PEOPLE.items())
