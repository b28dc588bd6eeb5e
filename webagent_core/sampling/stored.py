"""A trajectory as a buffer keeps it: plain data from which its training rows can be made again, and no log-probability.

Log-probabilities of an earlier policy are of no use to a later one: whoever trains on a stored row computes the "old"
ones anew, with the policy that starts the update, so that its ratio begins at 1 (ARPO's authors do the same).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from webagent_core.episode.actions import Action
from webagent_core.episode.pictures import picture_urls
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory


@dataclass(frozen=True)
class Stored:
    """One trajectory in a buffer. The buffers look at all but `data`, which is the backend's own."""

    id: str  # unique in its buffer
    task: str  # what it is an attempt at; only equal tasks are the same task
    update: int  # batches before the one it was played in
    outcome: float
    steps: int = 1
    data: dict[str, Any] = field(default_factory=dict)  # plain: dicts, lists, texts, numbers, bytes

    def __post_init__(self) -> None:
        logps = sorted(name for name in self.data if "logp" in name or "log_prob" in name)
        if logps:
            raise ValueError(f"data.{logps[0]} is not allowed: log-probabilities of a stored row are computed anew")


def store(
    trajectory: Trajectory, update: int, number: int, *, outcome: float | None = None, pictures: bool = False
) -> Stored:
    """A scored trajectory, ready for a buffer. Its task is its group: the same page made from the same seed.

    Args:
        number: its place in the batch of `update`, to tell attempts at one task apart.
        outcome: what the task itself says, where the reward is shaped; None: the reward.
        pictures: keep screenshots and the pictures of each chat, for a policy with eyes.

    Raises:
        ValueError: it is not valid, so there is nothing to learn from it.
    """
    if not trajectory.valid:
        raise ValueError(f"{trajectory.group}: exit_status = {trajectory.exit_status} is not allowed: a valid one")
    return Stored(
        id=f"{update}/{number}/{trajectory.group}",
        task=trajectory.group,
        update=update,
        outcome=float(trajectory.reward if outcome is None else outcome),
        steps=len(trajectory.steps),
        data=record_of(trajectory, pictures=pictures),
    )


def record_of(trajectory: Trajectory, *, pictures: bool = False) -> dict[str, Any]:
    """What the training rows of a trajectory, and people, need of it; without pages and chats."""
    steps, so_far = [], []
    for step, repeats in zip(trajectory.steps, repeats_next(trajectory), strict=True):
        # Where the context only grows, each prompt begins with all that came before: kept once, not once a step.
        shared = 0
        for one, other in zip(so_far, step.prompt_ids, strict=False):
            if one != other:
                break
            shared += 1
        steps.append(
            {
                "shared": shared,
                "prompt_ids": list(step.prompt_ids[shared:]),
                "response_ids": list(step.response_ids),
                "response": step.response,
                "url": step.url,
                "action": _plain(step.action),
                "error": step.error,
                "repeats_next": repeats,
                "screenshot": step.screenshot if pictures else None,
                "pictures": picture_urls(step.messages) if pictures else [],
            }
        )
        so_far = [*step.prompt_ids, *step.response_ids]
    return {
        "task": trajectory.task,
        "seed": trajectory.seed,
        "group": trajectory.group,
        "goal": trajectory.goal,
        "exit_status": str(trajectory.exit_status),
        "reward": trajectory.reward,
        "answer": trajectory.answer,
        "steps": steps,
    }


def repeats_next(trajectory: Trajectory) -> list[bool]:
    """For each step, whether the next one finds the page as it was: its action changed nothing that can be seen.

    Screenshots are compared where both steps have one (WebGym), else page texts. The last step has no next one.
    """

    def same(one: Step, other: Step) -> bool:
        if one.screenshot is not None and other.screenshot is not None:
            return one.screenshot == other.screenshot
        return one.observation == other.observation

    steps = trajectory.steps
    return [same(one, other) for one, other in zip(steps, steps[1:], strict=False)] + [False] * bool(steps)


def trajectory_of(record: dict[str, Any]) -> Trajectory:
    """The trajectory of a record: token ids, responses, actions as they were; no pages, and of chats the pictures."""
    steps, so_far = [], []
    for kept in record["steps"]:
        prompt_ids = so_far[: kept["shared"]] + kept["prompt_ids"]
        action = kept["action"]
        if action is not None:
            action = Action(**action | {"keys": tuple(action["keys"]) if action["keys"] else None})
        steps.append(
            Step(
                url=kept["url"],
                observation="",
                messages=_with_pictures(kept["pictures"]),
                response=kept["response"],
                action=action,
                error=kept["error"],
                screenshot=kept["screenshot"],
                prompt_ids=prompt_ids,
                response_ids=list(kept["response_ids"]),
            )
        )
        so_far = prompt_ids + kept["response_ids"]
    return Trajectory(
        task=record["task"],
        seed=record["seed"],
        group=record["group"],
        goal=record["goal"],
        steps=steps,
        exit_status=ExitStatus(record["exit_status"]),
        reward=record["reward"],
        answer=record["answer"],
    )


def _with_pictures(urls: list[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": url} for url in urls]}] if urls else []


def _plain(action: Action | None) -> dict[str, Any] | None:
    if action is None:
        return None
    return asdict(action) | {"keys": list(action.keys) if action.keys else None}


def stored_state(entries: list[Stored]) -> list[dict[str, Any]]:
    return [{name: getattr(entry, name) for name in Stored.__dataclass_fields__} for entry in entries]


def load_stored(state: list[dict[str, Any]]) -> list[Stored]:
    return [Stored(**entry) for entry in state]
