"""WebArena's task files with addresses of one's own: what is left of the package's 812, and how they are judged."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from conftest import Site

from webagent_core.episode.browser_rollout import open_runner, settings_of
from webagent_core.episode.runner import Response
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.rewards import score_all
from webagent_core.rewards.for_recipe import check_rewards, facts_of, rewards_for
from webagent_core.tasks.lookup import check_tasks
from webagent_core.tasks.schedule import held_out_tasks, training_tasks
from webagent_core.tasks.task import Task
from webagent_core.tasks.webarena import SITES, package_file, read_webarena, why_not

ALL = {site: f"http://{site.replace('_', '-')}.test:7770/" for site in SITES}


def recipe(**changed) -> Recipe:
    given = {"tasks.names": ["webarena"], "tasks.train_seeds": [0, 700], "tasks.held_out_seeds": [700, 812],
             "reward.manager": "rules", "policy.warm_up": None}  # fmt: skip
    return load_recipe("webagent_r1", overrides=given | {key.replace("__", "."): v for key, v in changed.items()})


def test_of_the_packages_tasks_those_are_left_that_can_be_played_and_judged():
    tasks = read_webarena(package_file(), ALL, None)
    raw = {task["task_id"]: task for task in json.loads(package_file().read_text("utf-8"))}
    assert (len(raw), len(tasks)) == (812, 478)
    assert Counter(" ".join(sorted(task.evaluation)) for task in tasks.values()) == {
        "reference_answers": 325, "reference_url": 66, "program_html reference_url": 59, "program_html": 18,
        "reference_answers reference_url": 10,
    }  # fmt: skip
    reasons = Counter(why_not(task, ALL) for task in raw.values())
    assert reasons["it is judged on pages that the episode need not have seen"] == 297
    assert reasons["it begins in several windows"] == 5 and len(reasons) == 3
    for number, task in tasks.items():
        assert task.id == str(number) and task.instruction == raw[number]["intent"]


def test_addresses_stand_wherever_the_files_have_marks():
    tasks = read_webarena(package_file(), ALL, None)
    assert not any(re.search("__[A-Z_]+__", task.model_dump_json()) for task in tasks.values())
    assert tasks[44].start_url == "http://gitlab.test:7770"
    assert tasks[44].evaluation == {"reference_url": "http://gitlab.test:7770/dashboard/todos"}
    assert tasks[44].hosts == ("gitlab.test:7770",)
    two = next(task for task in tasks.values() if len(task.hosts) == 2)
    assert set(two.hosts) < {f"{site.replace('_', '-')}.test:7770" for site in SITES}


def test_tasks_on_other_sites_are_left_out():
    tasks = read_webarena(package_file(), {"shopping": ALL["shopping"]}, None)
    assert 50 < len(tasks) < 187
    assert {task.hosts for task in tasks.values()} == {("shopping.test:7770",)}
    plan = recipe(tasks__sites={"shopping": ALL["shopping"]}, train__eval_episodes=400)
    assert {task.seed for task in training_tasks(plan)} <= set(tasks)
    assert held_out_tasks(plan) == [Task("webarena", number) for number in tasks if number >= 700]


def test_the_rules_are_the_recipes_reward():
    plan = recipe(tasks__sites=ALL, tasks__train_seeds=[40, 50], tasks__held_out_seeds=[65, 67])
    check_tasks(plan)
    with pytest.raises(ValueError, match="asks a judge"):  # some of all the answers are compared by meaning
        check_rewards(recipe(tasks__sites=ALL))
    facts = facts_of(plan)
    assert facts["webarena#44"] == {"reference_url": "http://gitlab.test:7770/dashboard/todos"}
    assert set(facts) <= {f"webarena#{number}" for number in (*range(40, 50), 65, 66)}
    with pytest.raises(ValueError, match="nothing on their pages says how they went"):
        check_rewards(recipe(tasks__sites=ALL, reward__manager="page"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tasks__sites": {"shop": "http://a.test"}}, "tasks.sites.shop is not known; there are gitlab"),
        ({"tasks__sites": {"map": "a.test"}}, "tasks.sites.map = 'a.test' is not allowed: an http"),
        ({}, "tasks.sites = {}: no task of test.raw.json can be played"),
        ({"tasks__sites": ALL, "tasks__logins": "nowhere"}, "tasks.logins = 'nowhere': nowhere/.*.json is not there"),
        ({"tasks__sites": ALL, "tasks__file": "nowhere.json"}, "tasks.file = 'nowhere.json': no such file"),
        ({"tasks__sites": ALL, "tasks__names": ["webarena", "webarena-lite"]}, "one name for what is in one file"),
    ],
)
def test_what_cannot_be_used_is_told(changed, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said) as told:
        check_tasks(recipe(**changed))
    assert len(str(told.value).splitlines()) == 1


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    for content in ('{"a": 1}', "[1]", '[{"task_id": 0}]', "no json"):
        (tmp_path / "tasks.json").write_text(content)
        with pytest.raises(ValueError, match="tasks.json: no list of WebArena's tasks"):
            check_tasks(recipe(tasks__sites=ALL, tasks__file=str(tmp_path / "tasks.json")))


async def test_answers_and_addresses_are_judged_on_real_pages(tmp_path, site: Site):
    """A file in WebArena's form, on pages that stand for its shop, with a login that is a cookie."""
    site.page("cart", "Two items")
    site.page("shop", "<a href='cart.html'>Cart</a><p id=who></p><script>who.textContent = document.cookie</script>")

    def task(number: int, **evaluation) -> dict:
        return {"task_id": number, "sites": ["shopping"], "start_url": "__SHOPPING__/shop.html", "intent": "Look",
                "storage_state": "./.auth/shopping_state.json", "eval": evaluation}  # fmt: skip

    answered = {"eval_types": ["string_match"], "reference_answers": {"must_include": ["two"]}}
    found = {"eval_types": ["url_match"], "reference_url": "__SHOPPING__/cart.html"}
    (tmp_path / "tasks.json").write_text(json.dumps([task(0, **answered), task(1, **found)]))
    cookie = {"name": "user", "value": "emma", "domain": "127.0.0.1", "path": "/"}
    (tmp_path / "shopping_state.json").write_text(json.dumps({"cookies": [cookie], "origins": []}))
    plan = recipe(tasks__names=["mine"], tasks__file=str(tmp_path / "tasks.json"), tasks__logins=str(tmp_path),
                  tasks__sites={"shopping": f"http://{site.host}/"}, tasks__train_seeds=[0, 1],
                  tasks__held_out_seeds=[1, 2])  # fmt: skip
    check_tasks(plan)
    check_rewards(plan)
    scripts = {0: ['stop("Two items")', 'stop("2 items or 3")'], 1: ["click(1)", "stop()"]}
    async with open_runner(**settings_of(plan, lambda messages: 1)) as runner:

        async def attempt(number: int, responses: list[str]):
            left = iter(responses)

            async def answer(messages: list[dict]) -> Response:
                return Response(next(left))

            return await runner.run(Task("mine", number), answer)

        played = [await attempt(0, scripts[0][:1]), await attempt(0, scripts[0][1:]),
                  await attempt(1, scripts[1]), await attempt(1, scripts[1][1:])]  # fmt: skip
    assert "user=emma" in played[0].steps[0].observation
    rewards = await score_all(rewards_for(plan), played)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0, 0.0]
