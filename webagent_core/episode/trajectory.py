"""What an episode leaves behind: its steps, how it ended, and whether it may be learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from webagent_core.episode.actions import Action


class ExitStatus(StrEnum):
    """How an episode ended. The vocabulary is fixed: every part of the project and every report uses these words."""

    ANSWERED = "answered"  # the policy ended it: by stop(...) or by an action with which the task itself ends
    STEP_LIMIT = "step_limit"
    FORMAT_ERROR = "format_error"  # too many responses in a row held no action
    CONTEXT_OVERFLOW = "context_overflow"
    TASK_TIMEOUT = "task_timeout"  # wall clock; a policy can cause it, so its reward stands
    ENV_ERROR = "env_error"
    JUDGE_ERROR = "judge_error"
    CANCELLED = "cancelled"


# Ends that no policy can have caused. A trajectory with one of them says nothing about the policy: it leaves group
# statistics, loss, denominators and success metrics, and is only counted.
NOT_THE_POLICY = frozenset({ExitStatus.ENV_ERROR, ExitStatus.JUDGE_ERROR, ExitStatus.CANCELLED})


@dataclass
class Step:
    """One model call and the action that followed."""

    url: str
    observation: str  # the page as text, before the action
    messages: list[dict]  # the chat the policy was given: [{"role": ..., "content": ...}, ...]
    response: str = ""
    action: Action | None = None  # None: the response held no action
    error: str | None = None  # why there was no action, or what the page answered to one that could not be done
    screenshot: bytes | None = None  # JPEG of the page before the action
    prompt_ids: list[int] = field(default_factory=list)  # exactly the tokens the policy was given ...
    response_ids: list[int] = field(default_factory=list)  # ... and gave back, never re-tokenised
    cut: str | None = None  # what the chat lacks because it would not have fitted (see `contexts.Budget`)
    shown: str | None = None  # the page's text as the chat had it, where it was cut


@dataclass(frozen=True)
class FinalPage:
    """The page as it was when the episode first ended: what is graded, whatever the page does afterwards."""

    url: str
    text: str = ""  # as observations have it
    html: str = ""  # the document as it stood then, not as the server sent it
    screenshot: bytes | None = None


@dataclass
class Trajectory:
    """The steps of one attempt at one task."""

    task: str  # name of the task, e.g. "miniwob/click-button"
    seed: int  # seed of the page
    group: str  # attempts with the same group are compared with one another
    goal: str = ""
    steps: list[Step] = field(default_factory=list)
    exit_status: ExitStatus | None = None  # None while it runs
    reward: float | None = None  # None: not scored
    outcome: float | None = None  # what the task came to, where the reward holds more than that; None: it is the reward
    answer: str | None = None  # text of stop("...")
    detail: str = ""  # for people: the error behind an env_error, the page's own reason for a failure
    seconds: float = 0.0
    final: FinalPage | None = None  # None: not recorded; what the last step saw is then the newest there is
    evidence: list[dict] = field(default_factory=list)  # what the reward rests on: a judge's words, a rule's findings

    @property
    def valid(self) -> bool:
        """Whether the reward says something about the policy (see `NOT_THE_POLICY`)."""
        return self.exit_status is not None and self.exit_status not in NOT_THE_POLICY and self.reward is not None

    @property
    def score(self) -> float | None:
        """What the task came to: what success, filters and replay look at. None: not valid."""
        return (self.reward if self.outcome is None else self.outcome) if self.valid else None

    @property
    def success(self) -> bool:
        return self.valid and self.score >= 1.0
