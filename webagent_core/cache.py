"""Where what is made once and used again is kept: unpacked models, demonstrations, warmed-up policies."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$WEBAGENT_CACHE, else webagent-rl in the user's cache folder."""
    home = os.environ.get("WEBAGENT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "webagent-rl"
