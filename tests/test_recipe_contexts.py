"""Every recipe's context on real pages, in the tiny policy's own tokens: what it is shown fits, and is on record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from conftest import Site
from datasets import Dataset
from transformers import AutoTokenizer

from trl_webagent import StepGRPOConfig, StepGRPOTrainer
from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import CoordinateSpace
from webagent_core.episode.browser_rollout import BrowserRollout, settings_of
from webagent_core.episode.contexts import CONTEXTS, Budget, ScreenshotContext, UITars2Context, chat_counter, goal_of
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.runner import EpisodeLimits, EpisodeRunner, Response
from webagent_core.episode.sequence import sequences_of
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.objectives import load_objective
from webagent_core.policy.demonstrations import gather, retold
from webagent_core.policy.tiny import BASE
from webagent_core.recipe import load_recipe
from webagent_core.tasks.demonstrations import demonstrate
from webagent_core.tasks.task import Outcome, Task

TOKENIZER = AutoTokenizer.from_pretrained(BASE)
EVERY = sorted(CONTEXTS)
VISUAL = [name for name in EVERY if issubclass(CONTEXTS[name], ScreenshotContext)]
LARGE = """<button>Wait</button><main></main><script>
let step = 0;
const next = () => {
  step += 1;
  const lines = Array.from({ length: 20 + 30 * (step % 4) }, (_, line) => `<p>line ${line} of ${step}</p>`);
  document.querySelector("main").innerHTML = lines.join("");
};
next();</script>"""
on_module_loop = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Changing:
    """A task set of one page that is another, and most often a large one, after every action."""

    url: str
    unread: str | None = None

    def hosts_of(self, task: Task) -> None:
        return None

    async def open(self, page: WebPage, task: Task) -> str:
        await page.goto(self.url)
        return "Wait for it."

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        await page.evaluate("next()")
        return Outcome(done=False)


def rendered(messages: list[dict]) -> list[int]:
    """The tokens of a chat, pictures left out."""
    flat = [
        {"role": message["role"], "content": "\n".join(part["text"] for part in message["content"] if "text" in part)}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    return TOKENIZER.apply_chat_template(flat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def saying(text: str):
    """A policy that always says the same; its token ids are what the tokenizer makes of that, and the end of a turn."""
    ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]

    async def generate(messages: list[dict]) -> Response:
        return Response(text, rendered(messages), list(ids), "stop")

    return generate


async def played(pool: BrowserPool, url: str, settings: dict, policy, steps: int) -> Trajectory:
    runner = EpisodeRunner(
        pool,
        Changing(url),
        settings["context"],
        EpisodeLimits(max_steps=steps, seconds=600),
        budget=settings["budget"],
        coordinates=settings["coordinates"],
        screenshots=settings["coordinates"] is not None,
    )
    return await runner.run(Task("site/large", 0), policy)


@on_module_loop
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
async def test_thirty_steps_on_large_pages_stay_within_the_recipes_tokens(pool: BrowserPool, site: Site, name: str):
    recipe = load_recipe(name)
    settings = settings_of(recipe, chat_counter(TOKENIZER))
    assert type(settings["context"]) is CONTEXTS[name] and settings["coordinates"] is None
    policy = saying("Wait 1\nAction: wait(0)")
    trajectory = await played(pool, site.page("large", LARGE), settings, policy, 30)
    limit = recipe.rollout.max_context_tokens - recipe.rollout.max_response_tokens
    for step in trajectory.steps:
        assert str(step.action) == "wait(0)" and isinstance(step.messages[-1]["content"], str)
        assert step.prompt_ids == rendered(step.messages) and len(step.prompt_ids) <= limit
        page_cut = step.cut is not None and "lines of the page" in step.cut
        last = step.messages[-1]["content"]
        assert last.endswith("[page cut here]" if page_cut else step.observation)
        assert (step.shown is not None) == page_cut and last.endswith(step.shown or "")
    cut = [step.cut for step in trajectory.steps if step.cut]
    assert any("lines of the page" in each for each in cut)
    if name == "arpo":  # nothing of what it was shown may go
        assert trajectory.exit_status is ExitStatus.CONTEXT_OVERFLOW and trajectory.valid
        assert f"{limit} fit" in trajectory.detail and len(trajectory.steps) == 2
        (row,) = sequences_of(trajectory)
        assert row.prompt_ids + row.response_ids == trajectory.steps[-1].prompt_ids + trajectory.steps[-1].response_ids
    else:
        assert trajectory.exit_status is ExitStatus.STEP_LIMIT and len(trajectory.steps) == 30
    # Of a past that is one memory or one response there is nothing to cut, of ARPO's nothing may go.
    past_is_cut = any("the oldest" in each or "summed up" in each for each in cut)
    assert past_is_cut == (name not in ("webgym", "asyncwebrl", "arpo"))


@on_module_loop
async def test_arpo_trains_on_exactly_what_was_sampled_in_one_row(pool: BrowserPool, site: Site):
    settings = settings_of(load_recipe("arpo"), chat_counter(TOKENIZER))
    url = site.page("small", LARGE.replace("20 + 30 * (step % 4)", "5 * step"))
    trajectory = await played(pool, url, settings, saying("Wait 1\nAction: wait(0)"), 3)
    (row,) = sequences_of(trajectory)
    first, second, third = trajectory.steps
    assert [step.cut for step in trajectory.steps] == [None] * 3
    assert row.prompt_ids + row.response_ids == third.prompt_ids + third.response_ids
    assert len(row.response_mask) == len(row.response_ids)
    sampled = []  # where in the row the three responses stand
    for step in (first, second, third):
        start = len(step.prompt_ids) - len(row.prompt_ids)
        sampled += range(start, start + len(step.response_ids))
    assert [at for at, mask in enumerate(row.response_mask) if mask] == sampled
    trained = [row.response_ids[at] for at in sampled]
    assert trained == first.response_ids + second.response_ids + third.response_ids


@on_module_loop
@pytest.mark.parametrize("name", VISUAL)
async def test_a_policy_with_eyes_is_shown_pictures_and_acts_at_their_points(
    pool: BrowserPool, site: Site, name: str
):
    overrides = {"policy.coordinates": "norm999", "tasks.names": ["miniwob/click-test"]}  # the papers' own are not here
    recipe = load_recipe(name, profile=None, overrides=overrides)
    settings = settings_of(recipe, chat_counter(TOKENIZER, tokens_per_picture=100))
    assert settings["coordinates"] == CoordinateSpace("norm999")
    policy = saying("There.\nMemory: none\nAction: click(start_box='(999,500)')")
    trajectory = await played(pool, site.page("large", LARGE), settings, policy, 3)
    assert trajectory.exit_status is ExitStatus.STEP_LIMIT
    assert [str(step.action) for step in trajectory.steps] == ["click(x=999, y=500)"] * 3
    for number, step in enumerate(trajectory.steps, 1):
        assert step.cut is None and step.messages[0]["content"].startswith(settings["context"].prompt)
        assert len(pictures_of(step.messages)) == (1 if name in ("webgym", "asyncwebrl", "openwebrl") else number)
        assert "line 5 of" not in str([part for part in step.messages[-1]["content"] if "text" in part])


# --- MiniWoB++, through the door that every trainer uses ---


@pytest.fixture(scope="module")
def rollout() -> Iterator[BrowserRollout]:
    with BrowserRollout(**settings_of(load_recipe("uitars2"), chat_counter(TOKENIZER)), screenshots=False) as rollout:
        yield rollout


def as_recipe(rollout: BrowserRollout, name: str) -> BrowserRollout:
    """The open rollout, set as it is opened for another recipe."""
    settings = settings_of(load_recipe(name), chat_counter(TOKENIZER))
    for setting in ("context", "budget", "coordinates", "limits"):
        setattr(rollout.runner, setting, settings[setting])
    return rollout


def test_a_rollout_is_opened_as_its_recipe_says(rollout: BrowserRollout):
    recipe, runner = load_recipe("uitars2"), rollout.runner
    assert type(runner.context) is UITars2Context and runner.context.shows_page and runner.context.system is None
    assert (runner.budget.max_tokens, runner.budget.reserve) == (
        recipe.rollout.max_context_tokens,
        recipe.rollout.max_response_tokens,
    )
    assert runner.coordinates is None and runner.limits.max_steps == recipe.rollout.max_steps
    assert not runner.final_screenshot  # the task's own word is the reward
    asked = load_recipe("uitars2", overrides={"reward.manager": "rules", "reward.facts": "facts.json"})
    assert settings_of(asked, chat_counter(TOKENIZER))["final_screenshot"]


TASKS = [Task("miniwob/click-option", 3), Task("miniwob/login-user", 4), Task("miniwob/click-collapsible", 5)]


@pytest.fixture(scope="module")
def demonstrated(rollout: BrowserRollout) -> list[Trajectory]:
    return gather(rollout, TASKS, mistakes=0.3, seed=1)


@pytest.mark.parametrize("name", EVERY)
def test_a_demonstrator_played_once_is_retold_as_every_context_shows_it(rollout: BrowserRollout, demonstrated, name):
    played = played_as_asked(as_recipe(rollout, name))
    assert [retold(rollout.runner, trajectory).steps for trajectory in demonstrated] == [each.steps for each in played]
    assert max(len(trajectory.steps) for trajectory in played) >= 3
    for step in (step for trajectory in played for step in trajectory.steps):
        assert step.cut is None and step.messages[-1]["content"].endswith(step.observation)
        assert len(rendered(step.messages)) < 300


def test_retelling_ends_where_the_context_has_no_more_room(rollout: BrowserRollout, demonstrated):
    runner = as_recipe(rollout, "arpo").runner  # keeps everything
    whole = max(demonstrated, key=lambda trajectory: len(trajectory.steps))
    count = chat_counter(TOKENIZER)
    runner.budget = Budget(count, count(retold(runner, whole).steps[0].messages) + 20)
    assert len(retold(runner, whole).steps) < len(whole.steps)


def played_as_asked(rollout: BrowserRollout) -> list[Trajectory]:
    """The tasks' demonstrators, asked by the rollout's own context at every step."""

    async def one(task: Task) -> Trajectory:
        rng, pages = random.Random(f"1/{task.group}"), []

        async def answer(chat: list[dict]) -> Response:
            return Response(demonstrate(task.name, goal_of(chat), pages[-1].text, 0.3, rng))

        return await rollout.runner.run(task, answer, watch=pages.append)

    async def every() -> list[Trajectory]:
        return await asyncio.gather(*(one(task) for task in TASKS))

    return rollout.loop.run(every())


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> StepGRPOTrainer:
    """TRL's side on the shipped tiny policy, sampling its likeliest token."""
    recipe = load_recipe("webagent_r1")
    arguments = StepGRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trainer")),
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=recipe.rollout.max_response_tokens,
        max_context_tokens=1024,
        top_k=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    return StepGRPOTrainer(
        str(BASE),
        objective=load_objective("openwebrl"),
        play=lambda rows, generate: [],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "-"}], "task": "-", "seed": 0}]),
        processing_class=AutoTokenizer.from_pretrained(BASE, padding_side="left", truncation_side="left"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_prompt_ids_are_the_chat_and_response_ids_what_was_sampled(
    rollout: BrowserRollout, trainer: StepGRPOTrainer, name: str
):
    as_recipe(rollout, name).runner.limits = EpisodeLimits(max_steps=3, max_format_errors=4)
    trajectories = rollout.play(TASKS, trainer.generate)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert len(steps) > len(trajectories)
    for step in steps:
        assert step.prompt_ids == rendered(step.messages)
        assert step.response == TOKENIZER.decode(step.response_ids, skip_special_tokens=True)
        ids = torch.tensor([step.prompt_ids + step.response_ids])
        with torch.no_grad():
            likeliest = trainer.model(input_ids=ids).logits[0].argmax(dim=-1).tolist()
        assert likeliest[len(step.prompt_ids) - 1 : -1] == step.response_ids
