"""verl's configuration as the recipes make it: numbers come from recipe.yaml, and what would go wrong is refused."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl_harness import RECIPES, composed

from verl_webagent.agent_loop import TRAJECTORY
from verl_webagent.checks import NOT_READ, check_pictures, left_to_trl
from verl_webagent.dataset import TaskDataset
from verl_webagent.group_filter import FilteringBuffer
from verl_webagent.recipe import recipe_of
from verl_webagent.reward_manager import WebAgentRewardManager
from verl_webagent.sessions import KEPT_IN, SCORED, Columns, facts_of, order_of, row_weights, sessions_of
from verl_webagent.stock import check_stock
from verl_webagent.validation import validate
from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import load_objective
from webagent_core.policy.tiny import BASE
from webagent_core.recipe import Critic, Sampling, Train, load_recipe
from webagent_core.rewards.local_judge import LocalJudge
from webagent_core.tasks.schedule import held_out_tasks, training_tasks

HOSTED = sorted(path.parent.name for path in RECIPES.glob("*/verl.yaml"))
MODEL = f"actor_rollout_ref.model.path={BASE}"


def test_eight_recipes_ship_a_yaml_and_a_script():
    assert HOSTED == ["arpo", "asyncwebrl", "openwebrl", "uitars2", "webagent_r1", "webgym", "webrl", "zerogui"]
    for name in HOSTED:
        assert (RECIPES / name / "train_verl.sh").is_file()


@pytest.mark.parametrize("name", HOSTED)
def test_numbers_are_the_recipes(name):
    config, recipe = composed([MODEL], name), load_recipe(name)
    validate(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    objective = recipe.load_objective()
    assert rollout.n == recipe.rollout.group_size
    assert config.data.train_batch_size == recipe.rollout.groups_per_update
    assert rollout.prompt_length + rollout.response_length == recipe.rollout.max_context_tokens
    assert actor.optim.lr == recipe.train.learning_rate and actor.ppo_epochs == recipe.train.num_iterations
    assert list(actor.optim.betas) == [recipe.train.adam_beta1, recipe.train.adam_beta2]
    assert actor.optim.clip_grad == recipe.train.max_grad_norm
    assert config.trainer.total_training_steps == recipe.train.updates
    assert actor.use_kl_loss == objective.uses_reference and config.critic.enable == objective.uses_critic
    assert config.trainer.v1.trainer_mode == ("webagent_colocate" if name == "asyncwebrl" else "webagent_sync")
    assert config.trainer.device == "cpu" and rollout.name == "hf"


def test_the_released_preset_and_overrides_reach_verl():
    config = composed([MODEL, "webagent.preset=released", 'webagent.set=["rollout.group_size=6"]', "webagent.seed=3"])
    assert config.actor_rollout_ref.rollout.n == 6
    recipe = recipe_of(config)
    assert recipe.preset == "released" and recipe.train.seed == 3
    assert recipe.load_objective().adv_eps == 1e-4


@pytest.mark.parametrize("name", HOSTED)
def test_the_gpu_machine_composes_with_the_papers_numbers(name):
    settings = 'webagent.set=["tasks.names=[miniwob/click-tab-2]", "policy.model=a/model", "reward.manager=page"]'
    config = composed([MODEL, "machine=gpus", "webagent.profile=null", settings, "trainer.nnodes=2"], name)
    validate(config)
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.actor.optim.lr == load_recipe(name, profile=None).train.learning_rate


@pytest.mark.parametrize("lora", [0, 32])
@pytest.mark.parametrize("name", HOSTED)
def test_the_cluster_profile_is_a_large_model_on_several_nodes_with_the_papers_numbers(name, lora, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # where judges and generators are asked
    # Adapters that are not merged verl checks against an installed vLLM.
    adapters = [f'webagent.set=["policy.lora.r={lora}"]', "actor_rollout_ref.model.lora.merge=true"] if lora else []
    nodes = ["machine=gpus", "trainer.nnodes=4", "trainer.n_gpus_per_node=8"]
    config = composed([MODEL, "webagent.profile=cluster", *nodes, *adapters], name)
    validate(config)
    recipe, paper, model = recipe_of(config), load_recipe(name, profile=None), config.actor_rollout_ref
    assert recipe.policy.model in ("Qwen/Qwen3-8B", "Qwen/Qwen3-VL-8B-Instruct") and recipe.policy.warm_up is None
    assert ("VL" in recipe.policy.model) == bool(recipe.context)
    assert recipe.rollout == paper.rollout and recipe.objective == paper.objective
    assert (config.trainer.device, config.trainer.nnodes) == ("cuda", 4)
    assert (model.rollout.name, model.actor.strategy, model.ref.strategy) == ("vllm", "fsdp2", "fsdp2")
    assert model.model.lora_rank == lora
    assert recipe.browser.pages * model.rollout.agent.num_workers == 128
    judged = name in ("openwebrl", "webrl", "zerogui")
    assert config.reward.reward_manager.name == ("webagent" if judged or name == "arpo" else "naive")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.v1.trainer_mode=sinc"], "trainer.v1.trainer_mode = 'sinc' is not registered.*webagent_sync"),
        (["algorithm.adv_estimator=grpoo"], "adv_estimator = 'grpoo' is not registered; there are .*webagent_r1"),
        (["actor_rollout_ref.rollout.name=vllmm"], "actor_rollout_ref.rollout.name = 'vllmm' is not registered.*hf"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=x"], "loss_mode = 'x' is not registered.* openwebrl"),
        (["reward.reward_manager.name=x"], "reward.reward_manager.name = 'x' is not registered; there are .*webagent"),
        (["actor_rollout_ref.actor.use_kl_loss=false"], "use_kl_loss = False: must be true for webagent_r1"),
        (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward = True: must be False"),
        (["actor_rollout_ref.actor.entropy_coeff=0.01"], "entropy_coeff = 0.01: must be 0"),
        (["actor_rollout_ref.actor.strategy=megatron"], "strategy = 'megatron': allowed are fsdp, fsdp2"),
        (["webagent.recipe=uitars", "webagent.profile=null"], "'uitars' cannot run on verl: it trains on pairs"),
        (["webagent.recipe=agentq", "webagent.profile=null"], "'agentq' cannot run on verl: it trains on pairs"),
        (['webagent.set=["policy.reference=tiny"]'], "policy.reference = 'tiny' cannot run on verl: its reference"),
        (['webagent.set=["critic.rows_per_step=8"]', "webagent.recipe=webrl"], "critic.rows_per_step = 8 is not"),
        (['webagent.set=["policy.lora.dropout=0.1"]'], "policy.lora.dropout = 0.1 is not allowed on verl, .* none: 0"),
        (["+webagent.colour=red"], "webagent.colour is not known; there are recipe, preset"),
        (["webagent.recipe=webagent_r2"], "recipe = 'webagent_r2' is not known; there are agentq"),
        (["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n = 1: must be at least 2"),
    ],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused_in_one_line(overrides, said):
    with pytest.raises(Exception, match=said) as error:
        validate(composed([MODEL, *overrides]))
    assert "\n" not in str(error.value).split("full_key")[0].strip()


def test_adapters_are_merged_for_the_rollout_on_cpu_and_have_the_whole_alpha_that_verl_takes():
    model = composed([MODEL, 'webagent.set=["policy.lora.r=4", "policy.lora.alpha=8.0"]']).actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.lora.merge) == (4, 8, True) and type(model.lora_alpha) is int
    with pytest.raises(Exception, match=r"policy.lora.alpha = 8.5 is not allowed on verl: a whole number"):
        validate(composed([MODEL, 'webagent.set=["policy.lora.r=4", "policy.lora.alpha=8.5"]']))


def test_what_a_verl_run_leaves_to_trl_is_said_and_switching_it_off_is_allowed():
    assert left_to_trl(load_recipe("webrl")) == ["phases", "the critic's own schedule"]
    assert left_to_trl(load_recipe("arpo")) == ["the choice of tasks before training"]
    assert left_to_trl(load_recipe("zerogui")) == left_to_trl(load_recipe("webagent_r1")) == []
    assert left_to_trl(load_recipe("zerogui", profile="cluster")) == ["tasks made before training"]
    validate(composed([MODEL, 'webagent.set=["sampling.updates_per_phase=null"]'], "webrl"))


def test_every_setting_that_verl_does_not_read_is_a_setting():
    """Or a name was changed and the refusal of it forgotten."""
    sections = {"critic": Critic, "train": Train, "sampling": Sampling}
    there = {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    assert {name for names in NOT_READ.values() for name in names} <= there


def test_the_modules_that_adapters_go_to_are_the_recipes():
    chosen = ["policy.lora.r=4", "policy.lora.target_modules=q_proj"]
    model = composed([MODEL, f"webagent.set={json.dumps(chosen)}"]).actor_rollout_ref.model
    assert model.target_modules == "q_proj" and composed([MODEL]).actor_rollout_ref.model.target_modules == "all-linear"


def test_critic_and_behaviour_policy_have_to_be_there_for_the_methods_that_use_them():
    with pytest.raises(ValueError, match="critic.enable = False: must be true for uitars2"):
        validate(composed([MODEL, "critic.enable=false"], "uitars2"))
    with pytest.raises(ValueError, match="calculate_log_probs = False: must be true for asyncwebrl"):
        validate(composed([MODEL, "actor_rollout_ref.rollout.calculate_log_probs=false"], "asyncwebrl"))


def test_a_policy_that_sees_needs_the_extra_that_opens_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is not installed
    check_pictures(load_recipe("openwebrl"))
    with pytest.raises(ModuleNotFoundError, match="context.observation = 'screenshot' needs torchvision .* `vision`"):
        check_pictures(load_recipe("openwebrl", profile="embedded_vision"))


def test_the_dataset_is_the_recipes_tasks_in_order():
    config, recipe = composed([MODEL, "webagent.seed=5"]), load_recipe("webagent_r1", overrides={"train.seed": 5})
    for files, tasks in (("training", training_tasks(recipe)), ("held-out", held_out_tasks(recipe))):
        dataset = TaskDataset(files, None, None, config.data)
        assert [(dataset[i]["task"], dataset[i]["seed"]) for i in range(len(dataset))] == [
            (task.name, task.seed) for task in tasks
        ]
    with pytest.raises(ValueError, match="allowed are 'training', 'held-out'"):
        TaskDataset("train.parquet", None, None, config.data)


# ------------------------------------------------------------------------------------------------------ rows, sessions


def a_batch() -> tuple[list[str], list[dict], Columns]:
    """Rows out of order: g has sessions of 3 and 1 steps and an invalid one; one row is padding."""
    rows = [("g_0_2", 1.0), ("g_1_0", 0.0), ("g_0_0", 1.0), ("pad_0_0", 9.0), ("g_2_0", 1.0), ("g_0_1", 1.0)]
    keys = [key for key, _ in rows]
    tags = [{"is_padding": key.startswith("pad")} for key in keys]
    extra = [{"valid": not key.startswith("g_2")} for key in keys]
    masks = [torch.tensor([True, True, False]) for _ in keys]
    return keys, tags, Columns(score=[score for _, score in rows], mask=masks, extra=extra)


def test_rows_are_read_as_trajectories_in_the_order_played():
    keys, tags, columns = a_batch()
    sessions = sessions_of(keys, tags)
    assert [(s.uid, s.number, s.rows) for s in sessions] == [("g", 0, (2, 5, 0)), ("g", 1, (1,)), ("g", 2, (4,))]
    facts = facts_of(load_objective("openwebrl"), sessions, columns)
    assert [(f.reward, f.valid, list(f.tokens)) for f in facts] == [
        (1.0, True, [2, 2, 2]),
        (0.0, True, [2]),
        (None, False, [2]),
    ]


def test_rows_are_put_in_the_order_drawn_and_played():
    arrived = ["1-b_2_0", "1-a_10_0", "0-c_0_1", "1-a_9_0", "0-c_0_0", "1-a_9_10", "1-a_9_2"]
    wanted = ["0-c_0_0", "0-c_0_1", "1-a_9_0", "1-a_9_2", "1-a_9_10", "1-a_10_0", "1-b_2_0"]
    assert [arrived[row] for row in order_of(arrived)] == wanted


def test_of_more_groups_than_a_batch_takes_the_first_drawn_are_taken():
    buffer = FilteringBuffer.__new__(FilteringBuffer)
    drawn = [f"{number:06d}-x" for number in range(40)]
    buffer.prompt_global_steps, buffer.partitions = {"train": dict.fromkeys(drawn, 1)}, {"train": {}}
    assert buffer._select_prompt_uids("train", set(drawn), 3)[0] == drawn[:3]


def test_padding_and_invalid_rows_weigh_nothing():
    keys, tags, columns = a_batch()
    sessions = sessions_of(keys, tags)
    objective = load_objective("webagent_r1")
    weights = row_weights(objective.plan(facts_of(objective, sessions, columns)), sessions, columns.mask)
    assert weights.coefficients.tolist() == pytest.approx([1 / 12, 1 / 4, 1 / 12, 0.0, 0.0, 1 / 12])
    assert weights.advantages[0].tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])
    assert weights.advantages[3].abs().sum() == weights.advantages[4].abs().sum() == 0


def test_a_reward_managers_word_counts_too():
    keys, tags, columns = a_batch()
    columns.extra[1]["reward_extra_info"] = {"valid": False}
    facts = facts_of(load_objective("openwebrl"), sessions_of(keys, tags), columns)
    assert [fact.valid for fact in facts] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uitars2", "whose GAE ends with each row"),
        ("webrl", "whose GAE ends with each row"),
        ("webagent_r1", "beta = 0.001 cannot run on a stock trainer, which does not weigh the KL term by row"),
        ("asyncwebrl", "behave_logp"),
    ],
)
def test_what_a_stock_trainer_would_get_wrong_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        check_stock(load_objective(name))
    assert check_stock(load_objective("webagent_r1", beta=0.0)).beta == 0


def test_the_recipes_reward_decides_which_manager_verl_asks(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert composed([MODEL]).reward.reward_manager.name == "naive"  # the loop knows what the page said
    assert composed([MODEL], "arpo").reward.reward_manager.name == "webagent"  # its format reward is added
    judged = [MODEL, 'webagent.set=["reward.manager=votes", "reward.judge.model=rule"]']
    validate(composed(judged))
    with pytest.raises(ValueError, match=r"reward.reward_manager.name = 'naive': must be webagent .*'votes'"):
        validate(composed([*judged, "reward.reward_manager.name=naive"]))
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(ValueError, match=r"asks a judge: reward.judge.base_url is not set"):
        validate(composed(judged))


async def test_the_reward_manager_tells_what_a_judge_said_and_what_it_did_not_say(monkeypatch):
    def played(seed: int) -> Trajectory:
        step = Step("http://a.test/", "Ok 1 <button>", [], "click(1)", Action("click", element="1"))
        about = {"goal": 'Click on "Ok".', "exit_status": ExitStatus.ANSWERED, "reward": 0.0}
        return Trajectory("miniwob/click-button", seed, f"miniwob/click-button#{seed}", steps=[step], **about)

    def session(trajectory: Trajectory, **more: str) -> SimpleNamespace:
        fields = np.array([{TRAJECTORY: trajectory, **more}], dtype=object)
        return SimpleNamespace(non_tensor_batch={"tool_extra_fields": fields})

    with LocalJudge() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.base_url)
        chosen = ["manager=judge", "judge_vision=false", "judge.model=rule", "judge.attempts=1", "format_weight=0.5"]
        settings = ", ".join(f'"reward.{each}"' for each in chosen)
        manager = WebAgentRewardManager(composed([MODEL, f"webagent.set=[{settings}]"]), None, None)
        judge.faults.extend(["", "prose"])
        good = await manager.run_single(session(played(0), **{KEPT_IN: "trajectories-train"}))
        bad = await manager.run_single(session(played(1), **{KEPT_IN: "trajectories-train"}))
        untidy = played(2)
        untidy.steps.insert(0, Step("http://a.test/", "Ok 1 <button>", [], "hm"))
        shaped = await manager.run_single(session(untidy))
    told = good["reward_extra_info"]
    assert (good["reward_score"], told["acc"], told["valid"], told["outcome"]) == (1.0, 1.0, True, 1.0)
    assert "Verdict: SUCCESS" in told[SCORED]["evidence"][0]["text"]
    told = bad["reward_extra_info"]
    assert (told["valid"], told["exit_status"]) == (False, "judge_error") and "no verdict" in told[SCORED]["detail"]
    told = shaped["reward_extra_info"]
    assert (shaped["reward_score"], told["outcome"], told["acc"]) == (0.5, 1.0, 1.0) and SCORED not in told


def test_success_is_of_the_outcome_where_the_reward_is_shaped():
    keys, tags, columns = a_batch()
    columns.extra[0]["reward_extra_info"] = {"valid": True, "outcome": 0.5}
    facts = facts_of(load_objective("openwebrl"), sessions_of(keys, tags), columns)
    assert [(fact.reward, fact.score) for fact in facts] == [(1.0, 0.5), (0.0, 0.0), (None, None)]


def test_an_interpolation_of_a_setting_that_is_not_there_names_it():
    config = composed([MODEL])
    OmegaConf.update(config, "trainer.note", "${webagent:train.no_such_number}", force_add=True)
    with pytest.raises(Exception, match="recipe webagent_r1 has no setting 'train.no_such_number'"):
        _ = config.trainer.note
