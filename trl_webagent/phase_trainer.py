"""WebRL's phases: every so many updates the policy of the moment becomes the reference, and the next tasks are made.

Within a phase all is as in CriticTrainer, with the reference that began it. Beside the new trajectories stand actions
of successes from earlier phases, which `Sampling` chooses by their perplexity under that reference. Between two phases
failed tasks are varied, and the critic's value of a proposal's first page decides whether it joins.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.callbacks import SyncRefModelCallback

from trl_webagent.critic_trainer import CriticTrainer
from trl_webagent.image_rows import open_pictures
from webagent_core.episode.runner import ContextOverflow, Response
from webagent_core.episode.trajectory import Step
from webagent_core.sampling.replay import perplexity
from webagent_core.sampling.stored import Stored, trajectory_of
from webagent_core.sampling.task_generation import NewTask
from webagent_core.tasks.task import Task


class PhaseTrainer(CriticTrainer):
    """CriticTrainer with the phases of its `sampling`; see the module's text.

    Without `sampling.updates_per_phase` the whole run is one phase: the reference stays, nothing is replayed. The
    metrics beside CriticTrainer's: `replay/stored`, `replay/rows`, and in a phase's first update `new_tasks/<what>`.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._perplexity: dict[str, list[float]] = {}  # of stored trajectories, by id, under the phase's reference
        if self.sampling is not None and self.sampling.updates_per_phase and self.ref_model is None:
            raise ValueError(
                f"sampling.updates_per_phase = {self.sampling.updates_per_phase} is not allowed with LoRA: each phase"
                " has a reference of its own, and the base model is the only one there"
            )

    # ------------------------------------------------------------------------------------------------ between phases

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._samples and self.sampling.between_phases:
            self._begin_phase()
        return super()._generate_and_score_completions(inputs)

    def _begin_phase(self) -> None:
        policy, reference = (self.accelerator.unwrap_model(model) for model in (self.model, self.ref_model))
        SyncRefModelCallback.sync_target_model(policy, reference, 1.0)
        self._perplexity.clear()
        report = asyncio.run(self.sampling.next_phase(self._first_values))
        if report is not None:
            metrics = self._metrics["train"]
            metrics["new_tasks/joined"].append(float(len(report.new)))
            for why, count in report.left_out.items():
                metrics[f"new_tasks/{why.replace(' ', '_')}"].append(float(count))

    async def _first_values(self, proposals: Sequence[NewTask]) -> list[float | None]:
        """The critic's value of each proposal's first state. Its page is opened, and no action done on it."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = list(range(rank, len(proposals), ranks))
        opened = self.play(
            [{"task": proposals[i].task.name, "seed": proposals[i].task.seed} for i in mine], self._say_nothing
        )
        seen = [(i, trajectory) for i, trajectory in zip(mine, opened, strict=True) if trajectory.steps]
        values = self._values([trajectory.steps[0] for _, trajectory in seen])
        found = dict(gather_object([(i, float(value[0])) for (i, _), value in zip(seen, values, strict=True)]))
        return [found.get(i) for i in range(len(proposals))]

    def _say_nothing(self, chats: list[list[dict]]) -> list[Response | ContextOverflow]:
        """Answers without an action, so that an episode shows its first page and ends."""
        prompt_ids, _, _ = self._tokenize_prompts(open_pictures(chats) if self._images else chats)
        return [Response("", list(ids), [self._tokenizer.eos_token_id], "stop") for ids in prompt_ids]

    # ------------------------------------------------------------------------------------------------ within a phase

    def _join(self) -> list[Stored | None]:
        """The tasks that this batch played count for the next phase, whatever joins it."""
        first = self.accelerator.process_index * len(self._trajectories)
        groups: dict[Task, list[float | None]] = {}
        goals: dict[Task, str] = {}
        played = []
        for index, each in enumerate(self._trajectories, start=first):
            reward, outcome = self._rewards[index], self._outcomes[index]
            score = None if math.isnan(reward) else reward if outcome is None else outcome
            played.append((Task(each.task, each.seed), each.goal, score))
        for task, goal, score in gather_object(played):
            groups.setdefault(task, []).append(score)
            goals[task] = goals.get(task) or goal  # an episode whose page did not open knows none
        for task, outcomes in groups.items():
            self.sampling.played(task, outcomes, goals[task])
        return super()._join()

    @torch.no_grad()
    def _perplexities(self, entries: Sequence[Stored]) -> list[list[float]]:
        """Of each entry's actions under the phase's reference; each rank scores a share of what is not known yet."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = [entry for entry in entries if entry.id not in self._perplexity][rank::ranks]
        steps = [trajectory_of(entry.data).steps for entry in mine]
        flat = [step for of_entry in steps for step in of_entry]
        sums = iter(self._sums_of(flat))
        scored = []
        for entry, of_entry in zip(mine, steps, strict=True):
            totals = [(next(sums), len(step.response_ids)) for step in of_entry]
            # An action without tokens is none that could be learned.
            scored.append((entry.id, [perplexity(total / m) if m else float("inf") for total, m in totals]))
        self._perplexity.update(gather_object(scored))
        return [self._perplexity[entry.id] for entry in entries]

    def _sums_of(self, steps: list[Step]) -> list[float]:
        """Log-probability of each response under the reference."""
        if not steps:
            return []
        rows = self._tokens(steps)
        return (self._logps(self.ref_model, rows).double() * rows["completion_mask"]).sum(1).tolist()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def critic_state(self) -> dict[str, Any]:
        """The critic's, and the reference, which is the policy at the start of the phase."""
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model).state_dict()
        return super().critic_state() | {"reference": reference}

    def load_critic_state(self, state: dict[str, Any]) -> None:
        super().load_critic_state(state)
        if state["reference"] is not None:
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(state["reference"])
