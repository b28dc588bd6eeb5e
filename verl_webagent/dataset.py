"""A recipe's tasks as the dataset that verl's trainer draws prompts from: `data.custom_cls` in the shipped YAML."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from verl_webagent.recipe import recipe_of
from webagent_core.sampling.state import Sampling
from webagent_core.tasks.schedule import held_out_tasks


class TaskDataset(Dataset):
    """One row a group: the recipe's training tasks in order, or, for `data_files` "held-out", those of evaluation."""

    def __init__(
        self, data_files: Any, tokenizer: Any, processor: Any, config: DictConfig, max_samples: int = -1
    ) -> None:
        names = [data_files] if isinstance(data_files, str) else list(data_files)
        if names not in (["training"], ["held-out"]):
            raise ValueError(f"data.train_files or data.val_files = {names!r}: allowed are 'training', 'held-out'")
        recipe = recipe_of(config)
        self.source = f"webagent-{recipe.type}"
        if names == ["training"]:
            sampling = Sampling(recipe)
            if sampling.candidates:  # a recipe that chooses among single tasks comes back to them
                sampling.tasks.restrict(sampling.candidates)
            # A group filter may play several groups for one that it keeps.
            groups = sampling.groups.most if sampling.groups else recipe.rollout.groups_per_update
            tasks = sampling.tasks.next(recipe.train.updates * groups)
        else:
            tasks = held_out_tasks(recipe)
        self.tasks = tasks if max_samples < 0 else tasks[:max_samples]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self.tasks[index]
        return {
            "raw_prompt": [{"role": "user", "content": task.group}],  # the page is what the policy is asked about
            "task": task.name,
            "seed": task.seed,
            "index": index,
            "data_source": self.source,
            "agent_name": "webagent",
            "reward_model": {"ground_truth": ""},
        }
