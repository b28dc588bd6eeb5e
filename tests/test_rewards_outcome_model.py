"""Outcome models: how they are read and trained; on real pages they tell success from failure (slow)."""

from __future__ import annotations

import io
import json
import random

import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from webagent_core.episode.actions import Action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.policy.demonstrations import gather
from webagent_core.policy.made_up_pages import words_of
from webagent_core.policy.tiny import BASE
from webagent_core.report.run_directory import RunDirectory
from webagent_core.rewards import pretrain_outcome_model, score_all
from webagent_core.rewards.made_up_attempts import MadeUpAttempts
from webagent_core.rewards.outcome_model import OUTCOME_BASE, OutcomeModel, OutcomeModelReward, auc, outcome_parts
from webagent_core.rewards.train_outcome_model import (
    Settings,
    batches,
    main,
    metrics,
    read_trajectories,
    split,
    train,
)
from webagent_core.tasks.task import Task

PAGE = "Cart\nBuy 1 <button>\nCancel 2 <button>"


def attempt(seed: int = 0, reward: float = 1.0, *, page: str = PAGE, goal: str = "Buy it", target: str = "1", **fields):
    action = Action("click", element=target)
    step = Step("http://a.test/", page, [{"role": "user", "content": page}], f"Buy {target}\nAction: {action}", action)
    status = fields.pop("status", ExitStatus.ANSWERED)
    return Trajectory("site/buy", seed, f"site/buy#{seed}", goal, [step], exit_status=status, reward=reward, **fields)


@pytest.fixture(scope="module")
def base() -> OutcomeModel:
    return OutcomeModel.load(BASE, dtype=torch.float32, max_tokens=512)


def test_webrl_reads_task_actions_and_the_last_page_and_uitars2_the_text_history():
    before, page, after = outcome_parts(attempt(answer="42"))
    assert before == "Task: Buy it\n" and page == PAGE
    assert "click(1) on Buy <button>" in after and "42" in after
    _, page, after = outcome_parts(attempt(), "uitars2")
    assert page == "" and "Buy 1\nAction: click(1)" in after
    assert outcome_parts(attempt(final=FinalPage("", text="Thanks")))[1] == "Thanks"
    with pytest.raises(ValueError, match="form = 'html'"):
        outcome_parts(attempt(), "html")


def test_yes_and_no_share_one_probability_and_no_row_knows_of_another(base):
    rows = [attempt(0), attempt(1, page=PAGE * 5), attempt(2, page="")]
    together, alone = base.probabilities(rows), [base.probabilities([row])[0] for row in rows]
    assert together == pytest.approx(alone, abs=1e-5)
    assert base.logits(rows).softmax(-1).sum(1).tolist() == pytest.approx([1, 1, 1])
    assert base.probabilities([]) == []


def test_a_page_that_is_too_long_loses_its_middle_and_nothing_else(base):
    ids = base.prompt_ids(attempt(page="First\n" + "word\n" * 2000 + "Last"))
    text = base.tokenizer.decode(ids)
    assert len(ids) <= 512
    assert "First" in text and "Last" in text and "click(1)" in text and text.count("Task: Buy it") == 2
    assert len(base.prompt_ids(attempt(goal="many words " * 500))) <= 512


def test_a_tokenizer_must_tell_the_answers_apart(base):
    class Same:
        def __call__(self, text, **_):
            return {"input_ids": [7]}

    with pytest.raises(ValueError, match="same token"):
        OutcomeModel(base.model, Same())


async def test_the_reward_is_the_thresholded_probability(base):
    row = attempt()
    (yes,) = base.probabilities([row])
    for threshold, value in ((yes * 0.9, 1.0), (yes + 0.1 * (1 - yes), 0.0)):
        (reward,) = await score_all(OutcomeModelReward(base, threshold=threshold), [row])
        assert reward.value == value and reward.evidence[0]["p_yes"] == pytest.approx(yes)
    (reward,) = await score_all(OutcomeModelReward(base, soft=True), [row])
    assert reward.value == pytest.approx(yes)
    with pytest.raises(ValueError, match="threshold = 1"):
        OutcomeModelReward(base, threshold=1)


def test_auc_counts_pairs():
    assert auc([0.9, 0.8, 0.1], [True, True, False]) == 1.0
    assert auc([0.5, 0.5], [True, False]) == 0.5
    assert auc([0.2, 0.9, 0.5], [True, False, True]) == 0.0
    with pytest.raises(ValueError, match="needs both"):
        auc([0.1], [True])


def test_a_runs_trajectories_are_read_back(tmp_path):
    invalid = attempt(5, None, status=ExitStatus.ENV_ERROR)
    odd = attempt(1, 0.0)
    odd.steps.append(Step("http://a.test/", "Other", [], "no idea", None, error="no action", screenshot=b"jpeg"))
    shaped = attempt(2, 0.4, outcome=1.0, final=FinalPage("http://a.test/end", "Thanks", screenshot=b"end"))
    run = RunDirectory(tmp_path)
    run.log_trajectories(0, "train", [attempt(0), odd, invalid, shaped])
    run.truncate_after(0)  # keeps every picture that a line names
    *read, last = read_trajectories(tmp_path)
    assert (last.reward, last.success, last.final) == (0.4, True, shaped.final)
    assert [(each.task, each.seed, each.reward, each.success) for each in read] == [
        ("site/buy", 0, 1.0, True),
        ("site/buy", 1, 0.0, False),
    ]
    assert outcome_parts(read[1]) == outcome_parts(odd)
    assert read[1].steps[1].screenshot == b"jpeg"


@pytest.mark.parametrize("name", ["missing/trajectories.jsonl", "metrics.jsonl"])
def test_a_file_that_is_none_is_named(tmp_path, name):
    with pytest.raises(ValueError, match="trajectories = .*is not allowed"):
        read_trajectories(tmp_path / name)


def test_attempts_at_one_page_are_never_on_both_sides():
    rows = [attempt(seed % 50) for seed in range(200)]
    training, held_out = split(rows, 0.3, 0)
    assert {each.group for each in training} & {each.group for each in held_out} == set()
    assert 0 < len(held_out) < len(training) and len(training) + len(held_out) == 200
    assert split(rows[:80], 0.3, 0)[1] == [each for each in rows[:80] if each.group in {h.group for h in held_out}]


def test_every_row_is_in_one_batch():
    rows = [attempt(seed, page="x " * seed) for seed in range(70)]
    cut = batches(rows, 8, random.Random(0))
    assert sorted(each.seed for batch in cut for each in batch) == list(range(70))
    assert max(map(len, cut)) == 8


def test_training_needs_both_kinds(base):
    with pytest.raises(ValueError, match="3 successes and 0 failures"):
        train(base, [attempt(seed) for seed in range(3)], Settings())


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"held_out": 1.0}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} = "):
        Settings(**bad)


def made_up(count: int) -> list[Trajectory]:
    """Successes end with the button that the goal names, failures with the other one."""
    rows = []
    for seed in range(count):
        right = "1" if seed % 2 else "2"
        goal = "Press Buy" if right == "1" else "Press Cancel"
        done = seed % 4 < 2
        rows.append(attempt(seed, float(done), goal=goal, target=right if done else "21"[int(right) - 1]))
    return rows


def test_training_learns_and_what_it_learnt_is_loaded_again(tmp_path):
    RunDirectory(tmp_path / "run").log_trajectories(0, "train", made_up(60))
    main([str(tmp_path / "run"), str(tmp_path / "out"), "--epochs", "8", "--batch-size", "16"])
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["held_out"]["auc"] > 0.9
    assert found["training"]["trajectories"] + found["held_out"]["trajectories"] == 60
    model = OutcomeModel.load(tmp_path / "out", dtype=torch.float32)
    assert (model.form, model.max_tokens) == ("webrl", 2048)  # it is asked as it was trained to be
    assert auc(model.probabilities(made_up(8)), [each.success for each in made_up(8)]) == 1.0


def test_the_same_seed_makes_the_same_model():
    said = []
    for _ in range(2):
        torch.manual_seed(0)
        model = OutcomeModel.load(BASE, dtype=torch.float32, max_tokens=512)
        train(model, made_up(8), Settings(epochs=1, batch_size=8))
        said.append(model.probabilities(made_up(4)))
    assert said[0] == said[1]


def test_the_script_says_what_is_wrong(tmp_path):
    with pytest.raises(SystemExit, match="train_outcome_model: trajectories = "):
        main([str(tmp_path / "no"), str(tmp_path)])


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def jpeg(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "JPEG")
    return file.getvalue()


def vision_model() -> OutcomeModel:
    """A vision-language model with random weights: two layers each."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    small = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, image_size=28, patch_size=14, **small)
    text = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, **small)
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token, vision_feature_layer=-1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    return OutcomeModel(model, tokenizer, form="uitars2", processor=processor)


def test_a_vision_model_sees_the_last_five_screenshots_and_is_loaded_again(tmp_path):
    def seen(*colours: str) -> Trajectory:
        row = attempt()
        row.steps = [Step("", "", [], "Buy", row.steps[0].action, screenshot=jpeg(colour)) for colour in colours]
        return row

    model = vision_model()
    six = ["red", "blue", "green", "white", "black", "red"]
    same, other = seen("white", *six[1:]), seen(*six[:5], "white")
    said = model.probabilities([seen(*six), same, other])
    assert said[0] == said[1] != said[2]
    model.save(tmp_path)
    assert OutcomeModel.load(tmp_path).probabilities([other]) == pytest.approx([said[2]])
    assert OutcomeModel.load(tmp_path, screenshots=1).screenshots == 1


def test_the_shipped_base_tells_right_from_wrong_on_made_up_pages_it_has_not_seen():
    assert sum(file.stat().st_size for file in OUTCOME_BASE.iterdir()) < 3_000_000
    assert "AUC 0.97" in (OUTCOME_BASE / "pretraining.log").read_text()
    model = OutcomeModel.load(OUTCOME_BASE, dtype=torch.float32)
    made = MadeUpAttempts(words_of(model.tokenizer), seed=77)
    attempts = [made.attempt() for _ in range(200)]
    assert auc(model.probabilities(attempts), [each.success for each in attempts]) > 0.93


def test_the_base_is_made_from_the_policys_by_practice(tmp_path):
    pretrain_outcome_model.main([str(tmp_path), "--steps", "3"])
    model = OutcomeModel.load(tmp_path, dtype=torch.float32)
    assert model.max_tokens == 2048 and 0 < model.probabilities([attempt()])[0] < 1


@pytest.mark.slow
def test_on_real_pages_success_and_failure_are_told_apart(tmp_path):
    names = ("choose-list", "click-button", "click-link", "click-test-2", "enter-text", "login-user")
    tasks = [Task(f"miniwob/{name}", seed) for seed in range(60) for name in names]
    with BrowserRollout(pages=4, screenshots=False) as rollout:
        played = gather(rollout, tasks, mistakes=0.6, seed=0)
    RunDirectory(tmp_path).log_trajectories(0, "train", played)
    training, held_out = split(read_trajectories(tmp_path), 0.25, 0)
    torch.manual_seed(0)
    model = OutcomeModel.load(OUTCOME_BASE, dtype=torch.float32, max_tokens=2048)
    train(model, training, Settings())
    found = metrics(model, held_out)
    assert found["trajectories"] >= 60 and found["trajectories"] - found["successes"] >= 15
    assert found["auc"] > 0.9, found
