"""A model that sampling asks, behind any chat-completions server: it words tasks and corrects attempts."""

from __future__ import annotations

from webagent_core.rewards.judge_client import JudgeClient, JudgeSettings


def client_of(settings: JudgeSettings, setting: str) -> JudgeClient:
    """The client; asks nothing yet.

    Args:
        setting: where a recipe has it, for messages.

    Raises:
        ValueError: there is no address, model or key, or a package is missing.
    """
    try:
        return JudgeClient(settings)
    except (ValueError, ModuleNotFoundError) as error:
        raise ValueError(str(error).replace("reward.judge", setting)) from None
