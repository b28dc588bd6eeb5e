"""An OpenEnv server in place of the browser: episodes on a real one, how actions are spelled, what its failures are."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from test_run_trl import finish, lines, start

from webagent_core.browser.errors import ActionFailed
from webagent_core.episode.actions import Action, CoordinateSpace
from webagent_core.episode.browser_rollout import open_runner, settings_of
from webagent_core.episode.runner import EpisodeLimits, Response
from webagent_core.episode.trajectory import ExitStatus
from webagent_core.recipe import load_recipe
from webagent_core.rewards.for_recipe import check_rewards
from webagent_core.tasks.lookup import check_tasks
from webagent_core.tasks.openenv import RemoteTasks, as_jpeg, browsergym, pyautogui
from webagent_core.tasks.task import Task

ARPO = Path(__file__).parents[1] / "recipes" / "arpo" / "train_trl.py"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("openenv", reason="the server of these tests is openenv's own: pip install openenv-core")
    with running_server() as (_, address):
        yield address


class running_server:
    """The server in a process of its own, and its address."""

    def __init__(self, sessions: int = 4) -> None:
        self.command = [sys.executable, str(Path(__file__).with_name("openenv_site.py")), str(sessions)]

    def __enter__(self) -> tuple[subprocess.Popen, str]:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        address = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        urllib.request.urlopen(f"{address}/health", timeout=60).close()
        return self.process, address

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def settings(address: str, **more):
    return {"task_set": RemoteTasks(address), "pages": 3, "limits": EpisodeLimits(max_steps=3, open_attempts=1)} | more


def wanted(chat: list[dict]) -> str:
    """The number of the word that the goal names."""
    text = "\n".join(str(message["content"]) for message in chat)
    word = re.search(r'(?:Press|Say) "(\w+)"', text)[1]
    return re.search(rf"{word} (\d) <button>", text)[1]


async def press(chat: list[dict]) -> Response:
    return Response(f"click({wanted(chat)})")


# --- Episodes --------------------------------------------------------------------------------------------------------


async def test_an_episode_on_the_server_is_a_trajectory_like_any_other(server):
    async with open_runner(**settings(server)) as runner:
        right = await runner.run(Task("press", 3), press)
        wrong = await runner.run(Task("press", 3), lambda chat: other(chat))
    for played, reward in ((right, 1.0), (wrong, 0.0)):
        assert (played.exit_status, played.reward, len(played.steps)) == (ExitStatus.ANSWERED, reward, 1)
    assert right.goal == wrong.goal and right.goal.startswith('Press "')
    assert right.steps[0].observation == wrong.steps[0].observation and "<button>" in right.steps[0].observation
    assert right.steps[0].url == "app://press" and right.final.text == right.steps[0].observation
    assert Image.open(io.BytesIO(right.steps[0].screenshot)).size == (150, 60)


async def other(chat: list[dict]) -> Response:
    return Response(f"click({int(wanted(chat)) % 3 + 1})")


async def test_sessions_at_the_same_time_do_not_mix(server):
    async with open_runner(**settings(server)) as runner:
        played = await asyncio.gather(*(runner.run(Task("press", seed), press) for seed in range(12)))
        assert [trajectory.reward for trajectory in played] == [1.0] * 12
        assert len({trajectory.steps[0].observation for trajectory in played}) > 3
        assert len(runner.pool._idle) == 3  # sessions are kept


async def test_an_answer_is_said_to_the_server(server):
    async def say(chat: list[dict]) -> Response:
        text = "\n".join(str(message["content"]) for message in chat)
        return Response('stop("' + re.search(r'Say "(\w+)"', text)[1] + '")')

    async with open_runner(**settings(server)) as runner:
        said, silent = await runner.run(Task("say", 1), say), await runner.run(Task("say", 1), quit_at_once)
    assert (said.reward, silent.reward) == (1.0, 0.0)
    assert said.exit_status is silent.exit_status is ExitStatus.ANSWERED


async def quit_at_once(chat: list[dict]) -> Response:
    return Response("stop()")


async def test_what_the_server_refuses_is_told_to_the_policy(server):
    async def lost(chat: list[dict]) -> Response:
        return Response("back()")

    async with open_runner(**settings(server)) as runner:
        played = await runner.run(Task("press", 5), lost)
    assert played.exit_status is ExitStatus.STEP_LIMIT and played.reward == 0.0
    assert all("go_back() is not understood" in step.error for step in played.steps)


async def test_a_policy_acts_at_points_of_the_servers_pictures(server):
    async def point(chat: list[dict]) -> Response:
        return Response(f"click(x={int(wanted(chat)) * 333 - 170}, y=500)")

    async with open_runner(**settings(server, coordinates=CoordinateSpace("norm1000"))) as runner:
        played = [await runner.run(Task("press", seed), point) for seed in range(3)]
    assert [trajectory.reward for trajectory in played] == [1.0] * 3


async def test_a_broken_environment_is_no_failure_of_the_policy(server):
    async with open_runner(**settings(server)) as runner:
        crashed = await runner.run(Task("crash", 0), press)
        unknown = await runner.run(Task("nothing of the kind", 0), press)
        after = await runner.run(Task("press", 0), press)
    assert crashed.exit_status is unknown.exit_status is ExitStatus.ENV_ERROR
    assert "the desktop is gone" in crashed.detail and "no task nothing" in unknown.detail
    assert after.reward == 1.0


async def test_a_server_that_dies_is_no_failure_of_the_policy(server):
    with running_server() as (process, address):
        async with open_runner(**settings(address)) as runner:
            assert (await runner.run(Task("press", 0), press)).reward == 1.0
            process.kill()
            process.wait()
            for _ in range(2):
                died = await runner.run(Task("press", 0), press)
                assert died.exit_status is ExitStatus.ENV_ERROR and died.reward is None


async def test_where_no_server_is_is_said_at_once():
    with pytest.raises(ConnectionError, match="tasks.server = 'http://127.0.0.1:9': no OpenEnv server there"):
        async with open_runner(**settings("http://127.0.0.1:9")):
            raise AssertionError("unreachable")


@pytest.mark.slow
def test_arpos_script_plays_on_a_server(server, tmp_path):
    """From the pretrained start of the tiny policy, which presses what a goal quotes: it leaves little to learn."""
    out = tmp_path / "run"
    settings = {"tasks.server": server, "tasks.names": "[press]", "policy.warm_up": "null", "train.updates": 2,
                "train.eval_every": 0, "train.save_every": 0, "browser.pages": 4, "rollout.temperature": 1.0,
                "sampling.candidate_tasks": "null", "sampling.task_trials": "null",
                "sampling.task_min_successes": "null"}  # fmt: skip
    finish(start(out, tmp_path, script=ARPO, **settings), 900)
    trained = [line for line in lines(out, "trajectories") if line["phase"] == "train"]
    assert {line["task"] for line in trained} == {"press"} and all(line["valid"] for line in trained)
    assert {line["steps"][0]["url"] for line in trained} == {"app://press"} and any(line["success"] for line in trained)
    assert len([line for line in lines(out, "metrics") if line["phase"] == "train"]) == 2


# --- Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "for_a_browser", "for_a_desktop"),
    [
        (Action("click", element="a12"), "click('a12')", None),
        (Action("click", x=3, y=4), "mouse_click(3, 4)", "pyautogui.click(3, 4)"),
        (Action("double_click", x=3, y=4), "mouse_dblclick(3, 4)", "pyautogui.doubleClick(3, 4)"),
        (Action("right_click", x=3, y=4), "mouse_click(3, 4, button='right')", "pyautogui.rightClick(3, 4)"),
        (Action("type", element="7", text="it's", enter=True), "fill('7', \"it's\")\npress('7', 'Enter')", None),
        (Action("type", text="a\nb"), r"keyboard_type('a\nb')", r"pyautogui.write('a\nb')"),
        (Action("select", element="7", option="x"), "select_option('7', 'x')", None),
        (Action("hotkey", keys=("ctrl", "c")), "keyboard_press('Control+c')", "pyautogui.hotkey('ctrl', 'c')"),
        (Action("scroll", direction="down"), "scroll(0, 400)", "pyautogui.scroll(-5)"),
        (Action("scroll", direction="left"), "scroll(-400, 0)", "pyautogui.hscroll(-5)"),
        (Action("goto", url="http://a.test/"), "goto('http://a.test/')", None),
        (Action("back"), "go_back()", None),
        (Action("wait", seconds=0.5), "noop(500)", "WAIT"),
        (Action("stop", answer="9 to 18"), "send_msg_to_user('9 to 18')", "DONE"),
    ],
)
def test_actions_are_spelled_as_the_server_wants_them(action, for_a_browser, for_a_desktop):
    assert browsergym(action) == for_a_browser
    if for_a_desktop is None:
        with pytest.raises(ActionFailed, match="acted on at points"):
            pyautogui(action)
    else:
        assert pyautogui(action) == for_a_desktop


def test_pictures_come_as_files_or_as_rows_of_pixels():
    made = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 0, 0)).save(made, "PNG")
    encoded = base64.b64encode(made.getvalue()).decode()
    for picture in (encoded, f"data:image/png;base64,{encoded}", [[[200, 0, 0]] * 40] * 20):
        image = Image.open(io.BytesIO(as_jpeg(picture)))
        assert (image.format, image.size) == ("JPEG", (40, 20)) and image.getpixel((5, 5))[0] > 190
    assert as_jpeg(None) is None and as_jpeg("") is None


def test_a_recipe_names_the_server():
    def recipe(**changed):
        given = {"tasks.server": "http://127.0.0.1:8000", "tasks.names": ["click-test", "login-user"]}
        return load_recipe("arpo", overrides=given | {key.replace("__", "."): value for key, value in changed.items()})

    check_tasks(recipe())
    check_rewards(recipe())
    assert settings_of(recipe(tasks__server_actions="pyautogui"), len)["task_set"].spelling == "pyautogui"
    for changed, said in (
        ({"tasks__server": "127.0.0.1:8000"}, "tasks.server = '127.0.0.1:8000' is not allowed: an http"),
        ({"tasks__file": "tasks.jsonl"}, "is not allowed with tasks.file: one of them"),
    ):
        with pytest.raises(ValueError, match=said):
            check_tasks(recipe(**changed))
    with pytest.raises(ValueError, match="server_actions = 'osworld' is not allowed"):
        recipe(tasks__server_actions="osworld")
