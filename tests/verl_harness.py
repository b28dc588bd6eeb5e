"""verl's real trainer, started once, driven by hand: rows are put where its rollout would put them, and what its
workers computed is read back."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from webagent_core.episode.trajectory import Trajectory
from webagent_core.objectives import Objective

os.environ.setdefault("VERL_PLATFORM", "cpu")
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TRANSFER_QUEUE_ENABLE": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "VERL_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}.items():
    os.environ.setdefault(_name, _value)

# Ray's workers import the tests' own agent loops.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(":")

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def composed(overrides: Sequence[str], recipe: str = "webagent_r1") -> Any:
    """verl's configuration as the recipe's verl.yaml makes it, with these overrides."""
    import verl  # noqa: F401
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(config_dir=str(RECIPES / recipe), version_base=None):
        return compose("verl", overrides=list(overrides))


def untrained_eyes(folder: Path) -> Path:
    """`folder`, with the tiny policy that sees in it, as no training has changed it yet."""
    from transformers import AutoConfig

    from webagent_core.policy.tiny import VISION_START
    from webagent_core.policy.tiny_vision import build_vision_policy

    build_vision_policy(AutoConfig.from_pretrained(VISION_START), seed=0).save_pretrained(folder)
    for file in VISION_START.iterdir():
        if file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def rows_of(trajectories: Sequence[Trajectory]) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Keys, columns and tags of these trajectories' rows, as verl has them after an agent loop has played."""
    keys, fields, tags, sessions = [], [], [], {}
    for trajectory in trajectories:
        number = sessions[trajectory.group] = sessions.get(trajectory.group, -1) + 1
        about = {"valid": trajectory.valid, "exit_status": str(trajectory.exit_status)}
        steps = [(step.prompt_ids, step.response_ids, 1) for step in trajectory.steps] or [([1], [1], 0)]
        for turn, (prompt, response, own) in enumerate(steps):
            ids = torch.tensor([*prompt, *response])
            score = torch.zeros(len(response))
            score[-1] = trajectory.reward or 0.0
            mask = torch.full((len(response),), own)
            keys.append(f"{trajectory.group}_{number}_{turn}")
            tags.append(
                {"status": "success", "prompt_len": len(prompt), "response_len": len(response), "seq_len": len(ids),
                 "global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
            )  # fmt: skip
            fields.append(
                {
                    "uid": trajectory.group,
                    "prompts": torch.tensor(prompt),
                    "responses": torch.tensor(response),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "input_ids": ids,
                    "position_ids": torch.arange(len(ids)),
                    "rollout_log_probs": torch.zeros(len(response)),
                    "rm_scores": score,
                    "multi_modal_inputs": {},
                    "num_turns": turn + 1,
                    "extra_fields": about,
                }
            )
    return keys, fields, tags


class VerlSession:
    """`with VerlSession(overrides) as session`: a trainer of the mode in the configuration, initialised, not fitted."""

    def __init__(self, overrides: Sequence[str], recipe: str = "webagent_r1") -> None:
        self.config = composed(
            [
                "+ray_kwargs.ray_init.log_to_driver=false",
                "+ray_kwargs.ray_init.logging_level=error",
                "trainer.resume_mode=disable",
                "webagent.out=null",
                f"trainer.default_local_dir={Path(tempfile.gettempdir()) / 'unused'}",
                *overrides,
            ],
            recipe,
        )

    def __enter__(self) -> VerlSession:
        import ray
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
        from verl.trainer.main_ppo import TaskRunnerV1
        from verl.trainer.ppo.v1 import get_trainer_cls

        environment = get_ppo_ray_runtime_env(self.config)
        environment.setdefault("env_vars", {}).update(TRANSFER_QUEUE_ENABLE="1")
        arguments = OmegaConf.to_container(self.config.ray_kwargs.ray_init, resolve=True)
        arguments.pop("runtime_env", None)
        ray.init(**arguments, runtime_env=environment)
        OmegaConf.update(self.config, "transfer_queue.enable", True)
        OmegaConf.resolve(self.config)
        tq.init(self.config.transfer_queue)
        self.trainer = get_trainer_cls(self.config.trainer.v1.trainer_mode)(config=self.config)
        self.trainer.init()
        self.trainer.global_steps = 1
        self.trainer.prev_step_profile = self.trainer.curr_step_profile = self.trainer.next_step_profile = False
        self.watch_gradients()
        self.runner = TaskRunnerV1.__ray_metadata__.modified_class()
        self.runner.config, self.runner.trainer = self.config, self.trainer
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        import transfer_queue as tq

        tq.close()
        ray.shutdown()

    def start_rollout(self) -> None:
        """Start the agent-loop workers, as verl's runner does before `fit`."""
        from verl.utils.skip import SkipManager

        self.runner.init_agent_loop_manager()
        self.trainer.agent_loop_manager = self.runner.agent_loop_manager
        SkipManager.init(self.config)
        self.trainer.on_train_begin()

    def step(self, *read: str) -> dict[str, Any]:
        """One whole step of the trainer, rollout included, as `fit` does it; its metrics.

        The columns named in `read` are left in `self.columns`, as `column` gives them.
        """
        import transfer_queue as tq

        trainer, metrics, started = self.trainer, {}, time.perf_counter()
        trainer.timing_raw = {}
        trainer.on_step_begin()
        batch = trainer.step(metrics, trainer.timing_raw)
        trainer.on_step_end()
        trainer.timing_raw["step"] = time.perf_counter() - started
        trainer._compute_metrics(batch, metrics, trainer.timing_raw, global_steps=trainer.global_steps, epoch=0)
        self.columns = {name: self.column(batch, name) for name in read}
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        trainer.global_steps += 1
        return metrics

    # ------------------------------------------------------------------------------------------------ batches

    def put(self, trajectories: Sequence[Trajectory]) -> Any:
        """These trajectories as rows in TransferQueue, as an agent loop leaves them; the batch's KVBatchMeta."""
        import transfer_queue as tq
        from transfer_queue import KVBatchMeta
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        keys, fields, tags = rows_of(trajectories)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
        return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})

    def overwrite(self, batch: Any, columns: Mapping[str, Mapping[tuple[str, int, int], torch.Tensor]]) -> Any:
        """Put other numbers into columns: {column: {(group, session, turn): (L,)}}; padding rows keep theirs."""
        import transfer_queue as tq
        from tensordict import TensorDict

        there = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask", *columns])
        fields = {}
        for name, given in columns.items():
            rows = []
            for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
                group, number, turn = key.rsplit("_", 2)
                row = given.get((group, int(number), int(turn))) if not tag.get("is_padding") else None
                rows.append(torch.zeros(len(there["response_mask"][i])) if row is None else row.float())
            fields[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return tq.kv_batch_put(
            keys=batch.keys, partition_id="train", fields=TensorDict(fields, batch_size=len(batch.keys))
        )

    def column(self, batch: Any, name: str) -> dict[tuple[str, int, int], Any]:
        """A column of the batch's own rows, by (group, session, turn)."""
        import transfer_queue as tq

        from verl_webagent.sessions import plain

        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])[name]
        data = data if torch.is_tensor(data) else plain(data)
        found = {}
        for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if not tag.get("is_padding"):
                group, number, turn = key.rsplit("_", 2)
                found[group, int(number), int(turn)] = data[i]
        return found

    def clear(self, batch: Any) -> None:
        import transfer_queue as tq

        tq.kv_clear(keys=batch.keys, partition_id="train")

    def update(
        self,
        trajectories: Sequence[Trajectory],
        objective: Objective,
        columns: Mapping[str, Mapping[tuple[str, int, int], torch.Tensor]] | None = None,
        **actor: Any,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """One whole update of `trajectories` under `objective`: (metrics, gradient by parameter name).

        `actor` overrides how the actor cuts its rows into micro-batches: `use_dynamic_bsz` with
        `max_token_len_per_gpu`, or without it `micro_batch_size_per_gpu`. The learning rate must be 0.
        """
        from functools import partial

        from verl_webagent.loss import policy_loss

        trainer = self.trainer
        # Where the trainer looks for the multiple that rows are filled up to.
        settings = self.config.actor_rollout_ref.actor
        settings.use_dynamic_bsz = actor.get("use_dynamic_bsz", True)
        settings.ppo_micro_batch_size_per_gpu = actor.get("micro_batch_size_per_gpu")
        trainer.objective = objective
        trainer.actor_rollout_wg.set_loss_fn(partial(policy_loss, objective))
        metrics: dict[str, Any] = {}
        batch = self.put(trajectories)
        batch = trainer._balance_batch(batch, metrics=metrics)
        batch = trainer._compute_old_log_prob(batch, metrics=metrics)
        batch = trainer._compute_ref_log_prob(batch, metrics=metrics)
        self.batch = batch
        if columns:
            batch = self.overwrite(batch, columns)
            batch.extra_info["temperature"] = 1.0
        batch = trainer._compute_advantage(batch, metrics=metrics)
        batch.extra_info.update(actor)
        trainer._update_actor(batch, metrics=metrics)
        gradient = self.gradient()
        self.batch = batch
        return metrics, gradient

    def watch_gradients(self) -> None:
        """Let every rank keep the gradient of its last optimizer step; verl clears it right after."""
        import ray

        def watch(worker: Any) -> None:
            inner = next(each for name, each in worker.worker_dict.items() if name.startswith("actor"))
            engine = inner.actor.engine
            step = engine.optimizer_step

            def kept_step() -> Any:
                engine.kept_gradient = {
                    name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
                    for name, p in engine.module.named_parameters()
                    if p.grad is not None
                }
                return step()

            engine.optimizer_step = kept_step

        ray.get([worker.__ray_call__.remote(watch) for worker in self.trainer.actor_rollout_wg.workers])

    def gradient(self) -> dict[str, torch.Tensor]:
        """The actor's gradient of the last update, whole."""
        import ray

        def read(worker: Any) -> dict[str, torch.Tensor]:
            inner = next(each for name, each in worker.worker_dict.items() if name.startswith("actor"))
            return inner.actor.engine.kept_gradient

        return ray.get(self.trainer.actor_rollout_wg.workers[0].__ray_call__.remote(read))
