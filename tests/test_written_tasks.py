"""Tasks in a file, one a line: what is refused, where a page may go, what rewards get to know, and a run on TRL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import QUICK, Site
from test_run_trl import finish, lines, start

from webagent_core.browser.pool import BrowserPool
from webagent_core.command_line import check_tasks
from webagent_core.episode.actions import Action
from webagent_core.episode.browser_rollout import open_runner, settings_of
from webagent_core.episode.runner import Response
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.rewards import score_all
from webagent_core.rewards.for_recipe import check_rewards, facts_of, rewards_for
from webagent_core.rewards.local_judge import LocalJudge
from webagent_core.sampling.state import Sampling
from webagent_core.tasks.page_server import PageServer
from webagent_core.tasks.schedule import held_out_tasks, training_tasks
from webagent_core.tasks.task import Task
from webagent_core.tasks.written import read_lines

WEBGYM = Path(__file__).parents[1] / "recipes" / "webgym" / "train_trl.py"
SHOP = {"instruction": "Buy it", "start_url": "http://shop.test/a"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A second site, on a port of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with PageServer(folder) as server:
        yield Site(folder, server.host)


def write(folder: Path, *tasks: dict | str) -> str:
    file = folder / "tasks.jsonl"
    file.write_text("\n".join(task if isinstance(task, str) else json.dumps(task) for task in tasks), "utf-8")
    return str(file)


def recipe(file: str, name: str = "webgym", **changed) -> Recipe:
    given = {"tasks.names": ["live"], "tasks.file": file, "tasks.train_seeds": [1, 5], "tasks.held_out_seeds": [5, 9],
             "reward.manager": "judge", "policy.warm_up": None}  # fmt: skip
    return load_recipe(name, overrides=given | {key.replace("__", "."): value for key, value in changed.items()})


# --- The file --------------------------------------------------------------------------------------------------------


def test_a_line_is_a_task_and_its_number_the_seed(tmp_path):
    other = SHOP | {"allowed_hosts": ["*.test", "cdn.example:8443"], "max_steps": 3}
    tasks = read_lines(write(tmp_path, SHOP, "", other))
    assert list(tasks) == [1, 3]
    assert tasks[1].hosts == ("shop.test",) and tasks[3].hosts == ("*.test", "cdn.example:8443")
    assert (tasks[1].instruction, tasks[1].max_steps, tasks[3].max_steps) == ("Buy it", None, 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", r"\[1\] is not allowed: a JSON object"),
        ({"instruction": "Buy it"}, "start_url is missing"),
        (SHOP | {"instruction": " "}, "instruction = ' ' is not allowed: a text that is not empty"),
        (SHOP | {"start_url": "shop.test"}, "start_url = 'shop.test' is not allowed: a full http"),
        (SHOP | {"start_url": "file:///etc/passwd"}, "start_url = 'file:///etc/passwd' is not allowed"),
        (SHOP | {"goal": "x"}, "unknown field goal; allowed: instruction, start_url"),
        (SHOP | {"rubric": []}, r"rubric = \[\] is not allowed"),
        (SHOP | {"rubric": "It is bought"}, "rubric = 'It is bought' is not allowed"),
        (SHOP | {"rubric": ["It is bought", ""]}, "rubric.1 = '' is not allowed"),
        (SHOP | {"difficulty": -1}, "difficulty = -1 is not allowed"),
        (SHOP | {"max_steps": 0}, "max_steps = 0 is not allowed"),
        (SHOP | {"max_steps": "9"}, "max_steps = '9' is not allowed"),
        (SHOP | {"allowed_hosts": ["http://shop.test"]}, "allowed_hosts: 'http://shop.test' is not allowed: host,"),
        (SHOP | {"allowed_hosts": ["other.test"]}, "start_url = .* its host is not one of allowed_hosts"),
        (SHOP | {"evaluation": {"url": "x"}}, "evaluation = .* any of reference_answers, reference_url, program_html"),
        (SHOP | {"evaluation": {"reference_answers": {"exact": "x"}}}, "unknown key 'exact'"),
    ],
)
def test_what_is_wrong_is_told_with_line_and_field(tmp_path, line, said):
    with pytest.raises(ValueError, match=rf"^tasks.jsonl:3: .*{said}") as told:
        read_lines(write(tmp_path, SHOP, SHOP, line))
    assert len(str(told.value).splitlines()) == 1


def test_a_file_without_tasks_or_none_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no task"):
        read_lines(write(tmp_path, "", " "))
    with pytest.raises(FileNotFoundError, match="tasks.file = 'nowhere.jsonl'"):
        check_tasks(recipe("nowhere.jsonl"))


def test_settings_that_do_not_go_with_the_file_are_refused(tmp_path):
    file = write(tmp_path, *[SHOP] * 8, SHOP | {"difficulty": 3})
    for changed, said in (
        ({"tasks__held_out_seeds": [100, 200]}, r"tasks.held_out_seeds = \[100, 200\] holds none of the 9 tasks"),
        ({"tasks__names": ["a", "b"]}, r"tasks.names = \['a', 'b'\] is not allowed: one name"),
        ({}, r"live#9: difficulty = 3 is not allowed: 0 to 2"),
    ):
        with pytest.raises(ValueError, match=said):
            check_tasks(recipe(file, **changed))
    for changed, said in (
        ({"reward__manager": "page"}, "nothing on their pages says how they went"),
        ({"reward__manager": "rubric"}, "task 1 has no rubric, which reward.manager = 'rubric' goes by"),
    ):
        with pytest.raises(ValueError, match=said):
            check_rewards(recipe(file, **changed))


# --- What is played --------------------------------------------------------------------------------------------------


def test_training_and_evaluation_play_their_own_lines_each_once_a_turn(tmp_path):
    file = write(tmp_path, *[SHOP] * 5, "", *[SHOP] * 2)
    plan = recipe(file, tasks__held_out_seeds=[5, 100], rollout__groups_per_update=2, train__updates=40)
    played = training_tasks(plan)
    turns = [[task.seed for task in played[at : at + 4]] for at in range(0, 80, 4)]
    assert all(sorted(turn) == [1, 2, 3, 4] for turn in turns) and len(set(map(tuple, turns))) > 5
    assert held_out_tasks(plan) == [Task("live", seed) for seed in (5, 7, 8)]
    drawn, resumed = Sampling(plan), Sampling(plan)
    assert drawn.tasks.next(13) == played[:13]
    resumed.load_state_dict(json.loads(json.dumps(drawn.state_dict())))  # in the middle of a turn
    assert resumed.tasks.next(67) == played[13:]


def test_step_limits_are_the_tasks_own_and_those_of_their_difficulty(tmp_path):
    levels = [{"difficulty": 0}, {"difficulty": 1, "max_steps": 2}, {}, {"max_steps": 50}]
    limits = Sampling(recipe(write(tmp_path, *[SHOP | each for each in levels]))).step_limits
    assert [limits(f"live#{line}", 0) for line in (1, 2, 3, 4)] == [4, 2, 8, 8]  # of 4, 6, 8 by difficulty


def test_rewards_find_in_the_file_what_they_go_by(tmp_path):
    told = {"rubric": ["It is paid"], "reference_answer": "9 to 18", "evaluation": {"reference_url": "http://a.test/b"}}
    file = write(tmp_path, SHOP | told, SHOP | told | {"reference_answer": None}, *[SHOP | told] * 8)
    assert facts_of(recipe(file, reward__manager="rubric"))["live#8"] == ["It is paid"]
    assert facts_of(recipe(file, reward__manager="rules"))["live#2"] == told["evaluation"]
    assert facts_of(recipe(file, "uitars2", reward__manager="mixed"))["live#2"] is None
    assert facts_of(recipe(file, tasks__train_seeds=[3, 5], reward__manager="reference"))["live#4"] == "9 to 18"
    assert "live#9" not in facts_of(recipe(file, reward__manager="rubric"))  # of no use, so not looked at
    with pytest.raises(ValueError, match="task 2 has no reference_answer"):
        facts_of(recipe(file, reward__manager="reference"))


async def test_an_episode_reaches_the_hosts_of_its_own_task_and_no_others(tmp_path, site, elsewhere):
    there = elsewhere.page("there", "Elsewhere <button>Buy</button>")
    here = site.page("here", f"<a href='{there}'>over there</a> <iframe src='{there}'></iframe>")
    both = [site.host, elsewhere.host]
    file = write(tmp_path, {"instruction": "Go", "start_url": here},
                 {"instruction": "Go", "start_url": here, "allowed_hosts": both})  # fmt: skip
    texts = {}
    async with open_runner(**settings_of(recipe(file), lambda messages: 1) | {"page_limits": QUICK}) as runner:
        for line in (1, 2):
            trajectory = await runner.run(Task("live", line), follow_then_stop)
            texts[line] = [step.observation for step in trajectory.steps]
            assert trajectory.goal == "Go" and trajectory.valid and len(trajectory.steps) == 2
    assert "over there" in texts[1][0] and not any("Elsewhere" in text for text in texts[1])
    assert "Elsewhere" in texts[2][0] and "Buy" in texts[2][1] and "over there" not in texts[2][1]


async def follow_then_stop(messages: list[dict]) -> Response:
    link = re.search(r"(?m)^over there (\d+) <link>", messages[-1]["content"])
    return Response(f"click({link[1]})" if link else "stop()")


async def test_a_kept_page_is_not_lent_to_an_episode_with_other_hosts(site, elsewhere):
    hosts = (site.host, elsewhere.host)
    there = elsewhere.page("kept", "Elsewhere")
    async with BrowserPool(pages=1, allowed_hosts=hosts, isolation="page", limits=QUICK) as pool:
        async with pool.page() as page:
            await page.goto(there)
        async with pool.page((site.host,)) as page:
            assert page.loans == 0
            with pytest.raises(Exception, match="is not allowed here"):
                await page.act(Action("goto", url=there))


async def test_a_judge_reads_the_rubric_of_the_line_that_was_played(tmp_path, site, monkeypatch):
    ok = site.page("ok", "<button onclick='document.body.textContent=\"Thanks\"'>Ok</button>")
    task = {"instruction": 'Press "Ok"', "start_url": ok}
    file = write(tmp_path, task | {"rubric": ['It says "Thanks"']}, task | {"rubric": ['It says "Sorry"']})
    answers = {True: "click(1)", False: "stop()"}
    with LocalJudge() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.base_url)
        plan = recipe(file, tasks__train_seeds=[1, 2], tasks__held_out_seeds=[2, 3], reward__manager="rubric",
                      reward__judge__model="rule", reward__judge_vision=False)  # fmt: skip
        check_tasks(plan)
        check_rewards(plan)
        async with open_runner(**settings_of(plan, lambda messages: 1)) as runner:

            async def press(messages: list[dict]) -> Response:
                return Response(answers["<button>" in messages[-1]["content"]])

            played = [await runner.run(Task("live", line), press) for line in (1, 2)]
        rewards = await score_all(rewards_for(plan), played)
    assert [reward.value for reward in rewards] == [1.0, 0.0]
    assert rewards[1].reasons == ('not met: It says "Sorry"',)


@pytest.mark.slow
def test_webgym_trains_on_a_file_with_a_judge_for_its_rubrics(tmp_path, site):
    """From the pretrained start of the tiny policy, which presses what a goal quotes more often than not."""
    tasks = []
    for number, word in enumerate(("Send", "Next", "Open", "Search"), start=1):
        page = f"<button onclick='this.textContent=\"Done {number}\"'>{word}</button> <button>No</button>"
        tasks.append({"instruction": f'Click on the "{word}" button.', "start_url": site.page(f"press{number}", page),
                      "rubric": [f'A page says "Done {number}"'], "max_steps": 2})  # fmt: skip
    out = tmp_path / "run"
    with LocalJudge() as judge:
        settings = {"tasks.names": "[live]", "tasks.file": write(tmp_path, *tasks), "tasks.train_seeds": "[1, 4]",
                    "tasks.held_out_seeds": "[4, 5]", "policy.warm_up": "null", "reward.manager": "rubric",
                    "reward.judge.model": "rule", "reward.judge.base_url": judge.base_url,
                    "reward.judge_vision": "false", "train.eval_every": 0, "train.updates": 2,
                    "train.save_every": 0, "rollout.temperature": 1.0}  # fmt: skip
        finish(start(out, tmp_path, script=WEBGYM, **settings), 900)
        assert judge.counts["rule"] > 0
    trajectories = lines(out, "trajectories")
    trained = [each for each in trajectories if each["phase"] == "train"]
    assert {each["group"] for each in trained} <= {"live#1", "live#2", "live#3"} and len(trained) == 24
    assert {each["group"] for each in trajectories if each["phase"] != "train"} == {"live#4"}
    assert all(each["valid"] and each["evidence"] and len(each["steps"]) <= 2 for each in trajectories)
    assert {each["reward"] for each in trained} == {0.0, 1.0}
    updates = [line for line in lines(out, "metrics") if line["phase"] == "train"]
    assert len(updates) == 2 and any(line["grad_norm"] > 0 for line in updates)
