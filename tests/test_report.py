"""The folder of a run, its learning curve and its report, on a made-up run."""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections import Counter

import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, sync_playwright

from webagent_core.browser.chromium import find_chromium
from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.report.learning_curve import moving_average, plot_learning_curve
from webagent_core.report.run_directory import RunDirectory
from webagent_core.report.summary import cut_steps, headline, summarise, wilson_interval
from webagent_core.report.text import one_line
from webagent_core.report.viewer import write_report

TASKS = ("click-button", "click-checkboxes", "click-tab", "enter-text", "focus-text", "login-user", "navigate-tree")


def jpeg(title: str, wanted: str, size: tuple[int, int] = (160, 210)) -> bytes:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, size[0], 48), fill="#ffff80")
    draw.text((6, 6), title[:24], fill="black")
    draw.text((6, 24), title[24:48], fill="black")
    for at, word in enumerate(("Cancel", wanted, "No")):
        draw.rectangle((20, 70 + 40 * at, 120, 96 + 40 * at), outline="#8a8a8a", fill="#efefef")
        draw.text((30, 77 + 40 * at), word, fill="black")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()


def trajectory(task: str, seed: int, group: str, status: ExitStatus, won: bool, steps: int = 2) -> Trajectory:
    wanted = random.Random(seed).choice(("Submit", "Ok", "Next", "Previous"))
    goal = f'Click on the "{wanted}" button.'
    made = Trajectory(f"miniwob/{task}", seed, group, goal, exit_status=status, seconds=0.4 * steps)
    for at in range(steps):
        page = f"[1] heading 'Choose'\n[12] button 'Cancel'\n[13] button '{wanted}'\n[14] button 'No'"
        messages = [
            {"role": "system", "content": "You act on a web page. Reply with one action, e.g. click(12)."},
            {"role": "user", "content": f"Goal: {goal}\n\n{page}"},
        ]
        last = at == steps - 1
        step = Step(url="http://127.0.0.1:8000/miniwob/click-button.html", observation=page, messages=messages)
        step.screenshot = jpeg(goal, wanted)
        step.prompt_ids, step.response_ids = list(range(180)), list(range(9))
        if status is ExitStatus.FORMAT_ERROR or (last and at % 3 == 1 and not won):
            step.response = f"I think that the {wanted} button should be clicked."
            step.error = "no action found: expected one of click, type, select, scroll, stop"
        else:
            step.response = f"The button '{wanted}' has id {13 if won else 12}.\nclick({13 if won else 12})"
            step.action = Action("click", element="13" if won else "12")
        made.steps.append(step)
    if status is ExitStatus.ENV_ERROR:
        made.detail = "net::ERR_CONNECTION_REFUSED at http://127.0.0.1:8000/"
    else:
        made.reward = 1.0 if won else 0.0
    return made


def make_run(path, updates: int = 6, groups: int = 2, size: int = 4, held_out: int = 32, finished: bool = True):
    """A run in which the policy learns: per update `groups` groups of `size` attempts."""
    draw = random.Random(0)
    run = RunDirectory(path)
    run.write_config(
        {
            "recipe": "openwebrl",
            "seed": 0,
            "objective": {
                "eps_low": {"value": 0.2, "from": "paper"},
                "eps_high": {"value": 0.28, "from": "paper"},
                "adv_eps": {"value": 1e-6, "from": "released"},
                "learning_rate": {"value": 3e-4, "from": "ours"},
            },
            "tasks": [f"miniwob/{task}" for task in TASKS],
        }
    )

    def evaluate(phase: str, update: int, skill: float) -> None:
        played = []
        for at in range(held_out):
            won = draw.random() < skill + 0.1 * (at % len(TASKS) - 3) / 3
            task = TASKS[at % len(TASKS)]
            played.append(trajectory(task, 9000 + at, f"{phase}/{at}", ExitStatus.ANSWERED, won))
        run.log_trajectories(update, phase, played)
        line = {"update": update, "phase": phase, "episodes": held_out, "seconds": {"evaluation": 11.0}}
        run.log_metrics(line | shares(played))

    def shares(played: list[Trajectory]) -> dict:
        valid = [t for t in played if t.valid]
        found = {
            "success": sum(t.success for t in valid) / len(valid),
            "return": sum(t.reward for t in valid) / len(valid),
        }
        found["steps"] = sum(len(t.steps) for t in valid) / len(valid)
        for task in sorted({t.task for t in valid}):
            of_task = [t for t in valid if t.task == task]
            found[f"success/{task}"] = sum(t.success for t in of_task) / len(of_task)
        return found | {f"exit_status/{s}": n for s, n in sorted(Counter(t.exit_status for t in played).items())}

    evaluate("before", 0, 0.4)
    for update in range(1, updates + 1):
        skill = 0.4 + 0.5 * (1 - math.exp(-2.5 * update / updates))
        played, advantages = [], []
        for group in range(groups):
            task = draw.choice(TASKS)
            members = []
            for _ in range(size):
                luck, steps = draw.random(), draw.choice((1, 2, 2, 3))
                won = draw.random() < skill
                if luck < 0.02:
                    status, won = ExitStatus.ENV_ERROR, False
                elif won:
                    status = ExitStatus.ANSWERED
                else:
                    losses = [ExitStatus.STEP_LIMIT, ExitStatus.FORMAT_ERROR, ExitStatus.ANSWERED]
                    status = draw.choices(losses, [3 * (1 - skill), 2 * (1 - skill), 1])[0]
                members.append(trajectory(task, 100 * update + group, f"{update}/{group}", status, won, steps))
            rewards = [t.reward for t in members if t.valid]
            mean = sum(rewards) / max(len(rewards), 1)
            advantages += [t.reward - mean if t.valid else None for t in members]
            played += members
        run.log_trajectories(update, "train", played, advantages)
        run.log_metrics(
            {"update": update, "phase": "train"}
            | shares(played)
            | {
                "loss": draw.gauss(-0.01, 0.02),
                "kl": 0.0004 * update * draw.uniform(0.8, 1.2),
                "grad_norm": 0.4 * math.exp(draw.gauss(0, 0.3)),
                "entropy": 1.1 * math.exp(-update / updates),
                "clip_ratio": 0.05 * draw.random(),
                "tokens_per_second": draw.gauss(1800, 90),
                "browser_steps_per_second": draw.gauss(14, 1),
                "seconds": {"rollout": draw.uniform(7, 9), "learn": draw.uniform(3, 4), "save": 0.3},
            }
        )
    if finished:
        evaluate("after", updates, 0.85)
    return run


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "openwebrl-miniwob")


# ---- the folder


def test_a_trajectory_comes_back_as_it_was_logged(tmp_path):
    run = RunDirectory(tmp_path / "run")
    played = trajectory("click-button", 7, "g1", ExitStatus.ANSWERED, won=True, steps=2)
    played.answer = "42"
    run.log_trajectories(3, "train", [played], [0.5])
    (line,) = run.trajectories()
    assert (line["update"], line["phase"], line["group"], line["task"]) == (3, "train", "g1", "miniwob/click-button")
    assert (line["seed"], line["goal"], line["answer"]) == (7, played.goal, "42")
    assert (line["reward"], line["advantage"], line["exit_status"]) == (1.0, 0.5, "answered")
    assert line["valid"] is True and line["success"] is True
    for step, kept in zip(played.steps, line["steps"], strict=True):
        assert kept["messages"] == step.messages and kept["observation"] == step.observation
        assert kept["response"] == step.response and kept["action"] == str(step.action) and kept["error"] is None
        assert (kept["prompt_tokens"], kept["response_tokens"]) == (180, 9)
        assert run.screenshot(kept["screenshot"]) == step.screenshot
    assert line["steps"][1]["screenshot"] == "screenshots/train-00003-0000-miniwob-click-button-seed7-step02.jpg"
    assert list(json.loads(run.trajectories_path.read_text()))[-1] == "seconds"


def test_an_observation_that_is_the_last_message_is_stored_once(tmp_path):
    run = RunDirectory(tmp_path)
    page = "[1] button 'Only once'"
    step = Step(url="http://a/", observation=page, messages=[{"role": "user", "content": page}])
    run.log_trajectories(0, "before", [Trajectory("t", 0, "g", steps=[step])])
    assert run.trajectories_path.read_text().count("Only once") == 1
    (line,) = run.trajectories()
    assert line["steps"][0]["observation"] == page and line["steps"][0]["messages"] == step.messages


def test_pictures_in_messages_are_not_copied_into_the_lines(tmp_path):
    run = RunDirectory(tmp_path)
    parts = [
        {"type": "text", "text": "the page:"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}},
    ]
    step = Step("http://a/", "page", [{"role": "user", "content": parts}], screenshot=jpeg("a", "b"))
    run.log_trajectories(0, "before", [Trajectory("t", 0, "g", steps=[step])])
    assert "base64" not in run.trajectories_path.read_text()
    (line,) = run.trajectories()
    assert line["steps"][0]["messages"][0]["content"] == [parts[0], {"type": "image_url"}]
    assert run.screenshot(line["steps"][0]["screenshot"]) == step.screenshot


def test_numbers_and_text_that_json_lacks_survive(tmp_path):
    run = RunDirectory(tmp_path)
    run.log_metrics(
        {"update": 1, "phase": "train", "loss": math.nan, "grad_norm": math.inf, "seconds": {"rollout": 1.5}}
    )
    (line,) = run.metrics()
    assert math.isnan(line["loss"]) and line["grad_norm"] == math.inf and line["seconds"] == {"rollout": 1.5}

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(run.metrics_path.read_text(), parse_constant=refuse)
    odd = "NUL \x00, lone surrogate \ud83d, line separator \u2028, NaN, 漢字"
    run.log_trajectories(1, "train", [Trajectory("t", 0, odd, goal=odd, answer="NaN", reward=-math.inf)], [math.nan])
    (line,) = run.trajectories()
    assert (line["goal"], line["group"], line["answer"]) == (odd, odd, "NaN")
    assert line["reward"] == -math.inf and math.isnan(line["advantage"])


def test_an_advantage_for_each_step_is_kept_and_shown(tmp_path):
    run = RunDirectory(tmp_path / "run")
    trajectory = Trajectory("t", 0, "t", goal="a goal", reward=1.0, exit_status=ExitStatus.ANSWERED)
    run.log_trajectories(1, "train", [trajectory], [[0.5, -0.25]])
    (line,) = run.trajectories()
    assert line["advantage"] == [0.5, -0.25]
    write_report(run, tmp_path / "report.html")
    (shown,) = embedded(tmp_path / "report.html")["trajectories"]
    assert shown["advantage"] == [0.5, -0.25]


def test_the_config_comes_back_as_it_was_written(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.config() == {}
    config = {
        "type": "arpo",
        "train": {"learning_rate": {"value": 1e-6, "from": "paper"}},
        "note": "a\x00b 漢字 \ud83d",
    }
    run.write_config(config)
    assert run.config() == config


def test_two_runs_of_equal_seeds_differ_in_nothing_but_seconds(tmp_path):
    logged = []
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        run = RunDirectory(tmp_path / name)
        played = trajectory("click-button", 7, "g1", ExitStatus.ANSWERED, won=True)
        played.seconds = seconds
        run.log_trajectories(1, "train", [played], [0.0])
        logged.append(list(run.trajectories()))
    first, second = logged[0][0], logged[1][0]
    assert (first.pop("seconds"), second.pop("seconds")) == (1.0, 2.0)
    assert first == second


def test_a_resumed_run_shows_no_update_twice(tmp_path):
    whole = make_run(tmp_path / "whole", updates=4)
    resumed = make_run(tmp_path / "resumed", updates=4)
    with resumed.trajectories_path.open("a") as file:
        file.write('{"update": 5, "phase": "tra')  # the process was killed here
    with resumed.metrics_path.open("a") as file:
        file.write('{"update": 5')
    resumed = RunDirectory(tmp_path / "resumed")
    resumed.truncate_after(2)
    assert [(m["update"], m["phase"]) for m in resumed.metrics()] == [(0, "before"), (1, "train"), (2, "train")]
    assert {t["update"] for t in resumed.trajectories()} == {0, 1, 2}
    named = {step["screenshot"] for t in resumed.trajectories() for step in t["steps"]}
    assert {f"screenshots/{file.name}" for file in resumed.screenshots_path.iterdir()} == named
    assert not list(resumed.path.glob("*.new"))

    lines = [json.loads(line) for line in whole.metrics_path.read_text().splitlines()]
    for line in lines[3:]:
        resumed.log_metrics(line)
    assert resumed.metrics_path.read_bytes() == whole.metrics_path.read_bytes()
    again = trajectory("click-button", 300, "3/0", ExitStatus.ANSWERED, won=True)
    resumed.log_trajectories(3, "train", [again], [0.0])
    assert [t["seed"] for t in resumed.trajectories() if t["update"] == 3] == [300]


def test_a_file_that_cannot_be_truncated_stays_as_it_is(tmp_path):
    run = make_run(tmp_path / "run", updates=2)
    before = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(before.replace(b'{"update": 1', b'{"update" 1'))
    damaged = run.metrics_path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*allowed is one JSON object a line"):
        run.truncate_after(1)
    assert run.metrics_path.read_bytes() == damaged


def test_a_line_cut_short_is_not_read_and_gives_way_to_the_next(tmp_path):
    run = RunDirectory(tmp_path)
    run.log_metrics({"update": 1, "phase": "train"})
    with run.metrics_path.open("a") as file:
        file.write('{"update": 2, "phase": "train", "loss": 0.')
    assert [line["update"] for line in run.metrics()] == [1]
    run.log_metrics({"update": 3, "phase": "train"})
    assert [line["update"] for line in run.metrics()] == [1, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.log_metrics({"update": 1}), "phase: got None, allowed is one of before, train, during, after"),
        (lambda run: run.log_metrics({"update": 1.5, "phase": "train"}), "update: got 1.5, allowed is an integer"),
        (lambda run: run.log_trajectories(-1, "train", []), "update: got -1, allowed is an integer of at least 0"),
        (lambda run: run.log_trajectories(1, "train", [], [0.1]), "advantages: got 1, allowed is one per trajectory"),
    ],
)
def test_a_bad_line_is_refused_with_what_is_allowed(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(RunDirectory(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_screenshot_outside_the_run_is_not_read(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    run = RunDirectory(tmp_path / "run")
    assert run.screenshot("../secret.jpg") is None
    assert run.screenshot("screenshots/gone.jpg") is None


# ---- numbers and words


def test_wilson_interval_agrees_with_published_values():
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(0.3, 0) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_interval_holds_its_share_to_the_last_bit_so_that_it_can_be_drawn(tmp_path, share):
    for episodes in range(1, 400):
        low, high = wilson_interval(share, episodes)
        assert 0.0 <= low <= share <= high <= 1.0, episodes
    run = RunDirectory(tmp_path)
    for phase, update in (("before", 0), ("during", 1), ("after", 2)):
        run.log_metrics({"update": update, "phase": phase, "success": share, "episodes": 200 if share else 75})
    plot_learning_curve(run, tmp_path / "learning_curve.png")
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000


def test_moving_average_is_centred():
    assert moving_average([0, 0, 3, 0, 0], 3) == [0, 1, 1, 1, 0]
    assert moving_average([1, 2, 3, 4, 5], 5) == [1, 2, 3, 4, 5]


def test_one_line_for_the_console():
    line = {"update": 3, "phase": "train", "success": 0.61, "return": 0.6, "steps": 2.3, "loss": -0.012, "kl": 0.003}
    line |= {"exit_status/env_error": 1, "exit_status/answered": 120, "exit_status/step_limit": 7}
    line |= {"grad_norm": 0.41, "tokens_per_second": 1800.2, "browser_steps_per_second": 14.0}
    assert one_line(line, updates=20) == (
        "update 3/20  success 0.61  return 0.60  steps 2.3  answered 120 step_limit 7 env_error 1"
        "  loss -0.012  kl 0.003  grad 0.41  1800 tok/s  14 steps/s"
    )
    assert "answered 3  cut prompts 5" in one_line({"update": 1, "exit_status/answered": 3, "cut_steps": 5})
    assert one_line({"update": 0, "phase": "before", "success": 0.45, "episodes": 128, "cut_steps": 0}) == (
        "before training  128 episodes  success 0.45"
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "Nothing was measured: no update has been logged yet."),
        (
            [("before", 0, 0.45, 128)],
            "Before training, 45% of held-out episodes succeed; no update has been logged yet.",
        ),
        (
            [("before", 0, 0.45, 128), ("train", 1, 0.5, 0), ("train", 7, 0.6, 0)],
            "Success on held-out seeds was 45% before training; in training it went from 50% to 60% over 7 updates;"
            " the run is still going or was interrupted.",
        ),
        (
            [("before", 0, 0.45, 128), ("train", 20, 0.6, 0), ("after", 20, 0.8, 128)],
            "Success on held-out seeds rose from 45% to 80% in 20 updates.",
        ),
        (
            [("before", 0, 0.45, 128), ("train", 20, 0.6, 0), ("after", 20, 0.4, 128)],
            "Success on held-out seeds fell from 45% to 40% in 20 updates;"
            " the 95% intervals overlap, so it may be chance.",
        ),
    ],
)
def test_the_headline_says_what_happened(lines, sentence):
    metrics = [{"phase": phase, "update": at, "success": s, "episodes": n} for phase, at, s, n in lines]
    assert headline(summarise(metrics)) == sentence


def test_of_lines_that_repeat_an_update_the_last_counts():
    lines = [
        {"phase": "train", "update": u, "exit_status/answered": n, "seconds": {"rollout": 1}}
        for u, n in ((1, 5), (1, 7))
    ]
    summary = summarise(lines)
    assert (summary.episodes, summary.total_seconds, len(summary.train)) == (7, 1, 1)


# ---- the learning curve


def colours(run: RunDirectory) -> set[tuple[int, int, int]]:
    file = io.BytesIO()
    plot_learning_curve(run, file)
    image = Image.open(file).convert("RGB")
    assert image.width > 1000
    return {colour for count, colour in image.getcolors(1 << 24) if count > 20}


def test_the_learning_curve_marks_each_evaluation_that_there_is(tmp_path, finished_run):
    before, after = (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)
    assert {before, after} <= colours(finished_run)
    interrupted = RunDirectory(tmp_path / "interrupted")
    for line in finished_run.metrics():
        if line["phase"] == "before" or (line["phase"] == "train" and line["update"] < 3):
            interrupted.log_metrics({k: v for k, v in line.items() if not k.endswith("env_error")})
    found = colours(interrupted)
    assert before in found and after not in found


def test_the_learning_curve_needs_no_particular_metric(tmp_path):
    colours(RunDirectory(tmp_path / "empty"))
    run = RunDirectory(tmp_path / "sparse")
    run.log_metrics({"update": 1, "phase": "train", "loss": math.nan, "grad_norm": 1e-9})
    run.log_metrics({"update": 2, "phase": "train", "grad_norm": 10.0, "success/$a_{b$": 0.5})
    run.log_metrics({"update": 2, "phase": "during", "success": 0.5, "episodes": 10})
    run.log_metrics({"update": 2, "phase": "after", "success": 0.5} | {f"success/task-{at}": 0.1 for at in range(40)})
    colours(run)


# ---- the report


def embedded(path) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.S)
    return json.loads(found)


def test_the_report_of_a_finished_run_holds_all_of_it(finished_run, report):
    text = report.read_text("utf-8")
    assert headline(summarise(finished_run.metrics())) in text
    lines = list(finished_run.trajectories())
    assert f"All {len(lines)} recorded trajectories are in this page." in text
    data = embedded(report)
    assert sorted(t["id"] for t in data["trajectories"]) == list(range(len(lines)))
    for shown in data["trajectories"]:
        line = lines[shown["id"]]
        assert (shown["goal"], shown["reward"], shown["advantage"]) == (line["goal"], line["reward"], line["advantage"])
        first = shown["steps"][0]
        assert [data["texts"][text] for _, text in first["messages"]] == [
            m["content"] for m in line["steps"][0]["messages"]
        ]


def test_a_report_within_bounds_spreads_what_it_shows(tmp_path, finished_run):
    write_report(finished_run, tmp_path / "report.html", max_trajectories=24)
    text = (tmp_path / "report.html").read_text("utf-8")
    shown = embedded(tmp_path / "report.html")["trajectories"]
    assert len(shown) == 24 and f"This page holds 24 of {len(list(finished_run.trajectories()))} recorded" in text
    lines = list(finished_run.trajectories())
    assert {t["task"] for t in shown} == {line["task"] for line in lines}
    assert {t["exit_status"] for t in shown} == {line["exit_status"] for line in lines}
    assert {(t["phase"], t["update"]) for t in shown} == {(line["phase"], line["update"]) for line in lines}

    room = 60_000
    write_report(finished_run, tmp_path / "small.html", max_bytes=room)
    data = embedded(tmp_path / "small.html")
    assert data["trajectories"] and data["pictures"]
    assert len(json.dumps([data[key] for key in ("trajectories", "groups", "texts", "pictures")])) <= room


def test_a_run_with_nothing_in_it_has_a_report(tmp_path):
    write_report(RunDirectory(tmp_path / "empty"), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "no update has been logged yet" in text and "No trajectory has been logged yet." in text


@pytest.fixture(scope="module")
def report(finished_run):
    path = finished_run.path / "report.html"
    write_report(finished_run, path)
    return path


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, path, problems: list[str]) -> Page:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(path.as_uri())
    return page


def test_a_click_on_a_trajectory_shows_its_steps(finished_run, report, browser):
    problems: list[str] = []
    page = opened(browser, report, problems)
    lines = list(finished_run.trajectories())
    wanted, line = next((at, t) for at, t in enumerate(lines) if t["phase"] == "train" and len(t["steps"]) == 3)
    page.click(f'#list button[data-id="{wanted}"]')
    assert page.inner_text("#detail h3") == line["goal"]
    facts = page.inner_text("#detail .facts")
    for said in (line["task"], str(line["seed"]), line["exit_status"], f"update {line['update']}"):
        assert said in facts
    assert page.locator("#detail .film button").count() == 3
    assert line["steps"][0]["response"] in page.inner_text("#detail .step pre.response")
    page.wait_for_function("document.querySelector('#detail .step img').naturalWidth === 160")
    page.click("#detail .step summary")
    assert line["steps"][0]["messages"][1]["content"] in page.inner_text("#detail .step details")

    page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail .url").startswith("Step 2 of 3")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#detail .url").startswith("Step 3 of 3")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#detail .url").startswith("Step 2 of 3")
    assert page.url.endswith(f"#t{wanted}s2")

    assert page.locator("#detail .siblings .member").count() == 4
    page.locator("#detail .siblings button.member").first.click()
    sibling = int(re.search(r"#t(\d+)s1$", page.url)[1])
    assert sibling != wanted and lines[sibling]["group"] == line["group"]
    assert problems == [report.as_uri()]
    page.close()


def test_a_prompt_that_was_cut_says_so_in_its_step_and_is_counted(tmp_path, browser):
    run, cut = RunDirectory(tmp_path), "the oldest 2 of 7 steps; the last 9 of 40 lines of the page <b>"
    played = trajectory("click-button", 1, "1/0", ExitStatus.ANSWERED, True, steps=3)
    played.steps[1].cut = cut
    broken = trajectory("click-button", 2, "1/1", ExitStatus.ENV_ERROR, False, steps=1)
    broken.steps[0].cut = "the oldest 1 of 7 steps"
    run.log_trajectories(1, "train", [played, broken])
    assert cut_steps([played, broken]) == {"cut_steps": 2}
    run.log_metrics({"update": 1, "phase": "train", "success": 1.0} | cut_steps([played, broken]))
    assert [step.get("cut") for step in next(iter(run.trajectories()))["steps"]] == [None, cut, None]
    write_report(run, tmp_path / "report.html")

    page = opened(browser, tmp_path / "report.html", [])
    page.click('#list button[data-id="0"]')
    assert "Cut from the prompt" not in page.inner_text("#detail .step")
    page.keyboard.press("ArrowRight")
    assert f"Cut from the prompt to make it fit: {cut}" in page.inner_text("#detail .step")
    row = page.locator(".glossary tr", has_text="cut_steps").inner_text()
    assert row.split("\t")[1:3] == ["2", "2"]
    page.close()


def test_what_a_judge_said_is_shown(tmp_path, browser):
    run, words = RunDirectory(tmp_path), "The page says <b>SUCCESS</b>.\nVerdict: NOT SUCCESS"
    judged = trajectory("click-button", 1, "1/0", ExitStatus.ANSWERED, False, steps=1)
    judged.evidence = [
        {"kind": "judge_failure", "model": "m", "error": "HTTP 500"},
        {"kind": "judge_reply", "model": "m", "text": words, "vote": 1, "finish_reason": "stop"},
    ]
    plain = trajectory("click-button", 1, "1/0", ExitStatus.ANSWERED, True, steps=1)
    run.log_trajectories(1, "train", [judged, plain])
    write_report(run, tmp_path / "report.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "report.html", problems)
    page.click('#list button[data-id="0"]')
    page.click("text=What the reward rests on: 2")
    assert page.locator("#detail pre.evidence").all_inner_texts() == ['{"error": "HTTP 500"}', words]
    assert "judge reply, vote 2 (m)" in page.inner_text("#detail")
    page.click('#list button[data-id="1"]')
    assert "rests on" not in page.inner_text("#detail")
    assert problems == [(tmp_path / "report.html").as_uri()]
    page.close()


def test_filters_leave_what_matches(finished_run, report, browser):
    page = opened(browser, report, [])
    lines = list(finished_run.trajectories())
    page.select_option('#filters [name="exit_status"]', "format_error")
    assert page.locator("#list button").count() == sum(t["exit_status"] == "format_error" for t in lines)
    page.click("#list button >> nth=0")
    assert "no action found" in page.inner_text("#detail .step pre.error")
    page.click("#clear")
    page.fill('#filters [name="words"]', "2/1")
    expected = sum("2/1" in t["group"] for t in lines)
    assert page.inner_text("#count") == f"{expected} of {len(lines)} listed"
    page.keyboard.press("ArrowRight")  # moves the caret, not the step
    assert page.inner_text("#detail .url").startswith("Step 1")
    page.close()


@pytest.mark.filterwarnings("ignore:Glyph")  # a font for every script is not required
def test_text_of_a_page_is_shown_and_never_run(tmp_path, browser):
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!--<script>"
    odd = "\x00 \ud83d \u2028 漢字"
    run = RunDirectory(tmp_path / evil.replace("/", ""))
    messages = [
        {"role": evil, "content": evil},
        {"role": "user", "content": [{"type": "text", "text": odd}, {"type": "image"}]},
    ]
    step = Step(url=f"javascript:{evil}", observation=evil + odd, messages=messages, response=evil, error=evil)
    shown = Trajectory(
        evil, 0, evil, goal=evil, steps=[step], exit_status=ExitStatus.ENV_ERROR, detail=evil, answer=evil
    )
    run.log_trajectories(1, "train", [shown, Trajectory(odd, 1, evil, goal=odd)], [math.nan, None])
    run.log_metrics({"update": 1, "phase": "train", f"success/{evil}": 0.5, "success": 0.5, f"success/{odd}": 0.1})
    run.write_config({evil: {"value": evil, "from": evil}, odd: [odd]})
    write_report(run, tmp_path / "report.html")

    problems: list[str] = []
    page = opened(browser, tmp_path / "report.html", problems)
    page.click('#list button[data-id="1"]')
    assert "ended before its first step" in page.inner_text("#detail")
    assert "漢字" in page.inner_text("#detail h3")
    page.click('#list button[data-id="0"]')
    assert page.inner_text("#detail h3") == evil
    assert page.inner_text("#detail .step pre.response") == evil
    assert page.inner_text("#detail .step pre.error") == evil
    assert "no screenshot" in page.inner_text("#detail .step .picture")
    page.locator("#detail .step details").evaluate_all("all => all.forEach((one) => (one.open = true))")
    assert page.inner_text("#detail .step details >> nth=0").count(evil) == 2  # as the role, as the content
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.scripts.length") == 2
    assert problems == [(tmp_path / "report.html").as_uri()]

    # The content security policy also stops what would get past the escaping.
    page.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.hacked = 1'>`)")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    page.close()
