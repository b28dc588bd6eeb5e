"""The tiny policy that sees: how pages become its tokens, who shows it what to do, and that it learns from that."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import AutoConfig
from trl import SFTConfig, SFTTrainer

from trl_webagent.image_rows import PictureCollator, imitation_rows
from webagent_core.browser.page import PageLimits
from webagent_core.command_line import checked_recipe, parser
from webagent_core.episode.actions import CoordinateSpace, parse_coordinate_action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import OpenWebRLContext
from webagent_core.episode.pictures import picture_part
from webagent_core.episode.runner import EpisodeLimits
from webagent_core.policy.tiny import VISION_START
from webagent_core.policy.tiny_vision import build_vision_policy
from webagent_core.policy.vision_demonstrations import gather, response
from webagent_core.policy.vision_processing import counter_of, load_processing_class, sees
from webagent_core.recipe import find_recipe, load_recipe
from webagent_core.tasks.targets import TARGETS, check_shown
from webagent_core.tasks.task import Task


@pytest.fixture(scope="module")
def processor():
    return load_processing_class(str(VISION_START))


def page(left: int, upper: int) -> dict:
    """A page of MiniWoB++'s size with one dark button."""
    image = Image.new("RGB", (160, 224), "white")
    ImageDraw.Draw(image).rectangle((left, upper, left + 40, upper + 30), fill="navy")
    image.save(data := BytesIO(), "JPEG")
    return picture_part(data.getvalue())


def chat(left: int, upper: int) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": "Task: Click the button."}, page(left, upper)]}]


def test_a_press_is_six_tokens_and_reads_back_as_itself(processor):
    text = response((136.4, 187.0))
    ids = processor.tokenizer(text + processor.tokenizer.eos_token)["input_ids"]
    assert len(ids) == 6
    action = parse_coordinate_action(processor.tokenizer.decode(ids[:-1]), space="pixel", image=(160, 224))
    assert (action.name, action.x, action.y) == ("click", 136, 187)


def test_a_screenshot_is_35_image_tokens_and_the_budget_counts_the_prompt_as_it_is(processor):
    recipe = load_recipe("openwebrl", profile="embedded_vision")
    (row,) = imitation_rows(processor, [chat(40, 100)], ["Action: click(1, 2)"])
    prompt = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
    assert prompt.count(processor.image_token_id) == 35
    assert counter_of(recipe)(chat(40, 100)) == len(prompt)


def test_only_the_response_is_learned(processor):
    (row,) = imitation_rows(processor, [chat(40, 100)], ["Action: click(1, 2)"])
    learned = [label for label in row["labels"] if label != -100]
    assert processor.tokenizer.decode(learned) == "Action: click(1, 2)<|im_end|>"
    assert row["input_ids"][-len(learned) :] == learned


def test_pictures_and_slots_must_be_equally_many(processor):
    with pytest.raises(ValueError, match="1 images for 2 slots"):
        processor(images=[Image.new("RGB", (160, 224))], text=["<|image_pad|> <|image_pad|>"])
    with pytest.raises(ValueError, match="0 images for 1 slots"):
        processor(text=["<|image_pad|>"])


def test_what_a_policy_that_sees_is_told_by_its_configuration(tmp_path, processor):
    assert sees(str(VISION_START))
    assert not sees(str(VISION_START.parent / "base"))
    processor.save_pretrained(tmp_path)
    build_vision_policy(AutoConfig.from_pretrained(VISION_START)).save_pretrained(tmp_path)
    again = load_processing_class(str(tmp_path))
    prompt = "<|vision_start|><|image_pad|><|vision_end|>Click"
    first, second = (each(images=[Image.new("RGB", (160, 224), "red")], text=prompt) for each in (processor, again))
    assert first["input_ids"] == second["input_ids"]
    assert torch.equal(first["pixel_values"], second["pixel_values"])


def test_equal_seeds_give_equal_weights_and_leave_random_state_alone():
    config = AutoConfig.from_pretrained(VISION_START)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (build_vision_policy(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    weight = "model.visual.blocks.0.attn.qkv.weight"
    assert torch.equal(one.get_parameter(weight), same.get_parameter(weight))
    assert not torch.equal(one.get_parameter(weight), other.get_parameter(weight))


def test_imitation_of_pictures_teaches_where_the_button_is(processor, tmp_path):
    places = [(20, 70), (100, 70), (20, 170), (100, 170)]
    chats, answers = [chat(*place) for place in places], [response((left + 20, upper + 15)) for left, upper in places]
    model = build_vision_policy(AutoConfig.from_pretrained(VISION_START), seed=3)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=40, learning_rate=3e-3,
            remove_unused_columns=False, report_to="none", save_strategy="no", logging_steps=40, disable_tqdm=True,
            use_cpu=True, bf16=False, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(imitation_rows(processor, chats, answers)),
        processing_class=processor,
        data_collator=PictureCollator(processor),
    )  # fmt: skip
    trainer.train()
    own = imitation_rows(processor, chats, answers)
    others = [row | {"pictures": own[index - 1]["pictures"]} for index, row in enumerate(own)]
    with torch.no_grad():
        seeing, misled = (float(model.eval()(**PictureCollator(processor)(rows)).loss) for rows in (own, others))
    assert seeing < 0.5 * misled  # a policy blind to the picture would do equally well with another page's


def test_demonstrators_who_point_succeed_on_real_pages_and_their_habit_does_nothing_there():
    settings = {"pages": 4, "context": OpenWebRLContext(), "limits": EpisodeLimits(3), "viewport": (160, 224)}
    settings["page_limits"] = PageLimits(load_seconds=20, call_seconds=20)
    tasks = [Task(name, 11) for name in sorted(TARGETS)]
    with BrowserRollout(**settings, coordinates=CoordinateSpace("pixel")) as rollout:
        played = gather(rollout, tasks, mistakes=0.0, seed=0)
        slips = gather(rollout, tasks, mistakes=1.0, seed=0)
    assert {trajectory.task: trajectory.success for trajectory in played} == dict.fromkeys(TARGETS, True)
    pressed = [step.action for trajectory in played for step in trajectory.steps]
    assert {action.name for action in pressed} == {"click"}
    assert {(action.x % 8, action.y % 8) for action in pressed} == {(4, 4)}
    assert {str(trajectory.exit_status) for trajectory in slips} == {"step_limit"}
    assert {step.response for trajectory in slips for step in trajectory.steps} == {"Action: click(12, 12)"}


def test_a_task_that_nobody_points_at_is_refused():
    with pytest.raises(ValueError, match="'miniwob/login-user' has no demonstrator who points"):
        check_shown("miniwob/login-user")


@pytest.mark.parametrize(
    "profile, model, observation", [("embedded", "tiny_vision", "text"), ("embedded_vision", "tiny", "screenshot")]
)
def test_a_tiny_policy_of_the_wrong_kind_is_refused(tmp_path, profile, model, observation):
    arguments = parser("openwebrl", "TRL").parse_args(["--profile", profile, "--set", f"policy.model={model}"])
    arguments.out = tmp_path
    with pytest.raises(ValueError, match=f"policy.model = '{model}' .* context.observation = '{observation}'"):
        checked_recipe(find_recipe("openwebrl"), arguments, None)
