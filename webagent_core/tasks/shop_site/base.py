"""A Django database engine: SQLite, on the file that belongs to whoever asks."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Any

from django.db.backends.sqlite3 import base

FILE: ContextVar[Path] = ContextVar("FILE")  # of the episode that this thread works for


class DatabaseWrapper(base.DatabaseWrapper):
    """Django has one of these a thread, opens a connection when it is used and closes it after the request."""

    def get_connection_params(self) -> dict[str, Any]:
        return super().get_connection_params() | {"database": FILE.get()}
