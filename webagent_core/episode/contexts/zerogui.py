"""ZeroGUI: UI-TARS's rule."""

from __future__ import annotations

from webagent_core.episode.contexts.uitars import UITarsContext


class ZeroGUIContext(UITarsContext):
    """ZeroGUI trains UI-TARS models and says nothing of its own on the prompt; the authors' code keeps the last five
    screenshots, which is UI-TARS's rule."""
