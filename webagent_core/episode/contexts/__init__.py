"""What the policy is shown at each step: one rule a paper of what is kept of the past, as chat messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from webagent_core.episode.contexts.agentq import AgentQContext
from webagent_core.episode.contexts.arpo import ARPOContext
from webagent_core.episode.contexts.asyncwebrl import AsyncWebRLContext
from webagent_core.episode.contexts.base import (
    SCREENSHOT_PROMPT,
    SYSTEM_PROMPT,
    ContextManager,
    ContextOverflow,
    ScreenshotContext,
    goal_of,
)
from webagent_core.episode.contexts.budget import Budget, CountTokens, Fit, chat_counter
from webagent_core.episode.contexts.hiconagent import HiconAgentContext
from webagent_core.episode.contexts.openwebrl import OpenWebRLContext
from webagent_core.episode.contexts.uitars import UITarsContext
from webagent_core.episode.contexts.uitars2 import UITars2Context
from webagent_core.episode.contexts.webagent_r1 import PlaceholderContext
from webagent_core.episode.contexts.webgym import WebGymContext
from webagent_core.episode.contexts.webrl import WebRLContext
from webagent_core.episode.contexts.zerogui import ZeroGUIContext

if TYPE_CHECKING:
    from webagent_core.recipe import Recipe

CONTEXTS: dict[str, type[ContextManager]] = {  # by type of recipe
    "agentq": AgentQContext,
    "arpo": ARPOContext,
    "asyncwebrl": AsyncWebRLContext,
    "hiconagent": HiconAgentContext,
    "openwebrl": OpenWebRLContext,
    "uitars": UITarsContext,
    "uitars2": UITars2Context,
    "webagent_r1": PlaceholderContext,
    "webgym": WebGymContext,
    "webrl": WebRLContext,
    "zerogui": ZeroGUIContext,
}


def context_for(recipe: Recipe) -> ContextManager:
    """The context of a recipe's paper, with the settings of the recipe's own `context` section."""
    context = CONTEXTS[recipe.type](**(recipe.context.model_dump(exclude_none=True) if recipe.context else {}))
    context.system = context.prompt if recipe.policy.system_prompt else None
    return context


__all__ = [
    "CONTEXTS",
    "SCREENSHOT_PROMPT",
    "SYSTEM_PROMPT",
    "ARPOContext",
    "AgentQContext",
    "AsyncWebRLContext",
    "Budget",
    "ContextManager",
    "ContextOverflow",
    "CountTokens",
    "Fit",
    "HiconAgentContext",
    "OpenWebRLContext",
    "PlaceholderContext",
    "ScreenshotContext",
    "UITars2Context",
    "UITarsContext",
    "WebGymContext",
    "WebRLContext",
    "ZeroGUIContext",
    "chat_counter",
    "context_for",
    "goal_of",
]
