"""Run something right after a module has been imported, whoever imports it and whenever that is.

verl imports its plugins in each of about seven processes, and each process needs a different part of verl. Code that
registers something into a verl module must not import that module itself: it waits until verl does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[], None]


class HookedLoader(Loader):
    """A module's own loader, with callbacks after it. Everything else about the module stays the original's."""

    def __init__(self, loader: Loader, after: Callable[[], None]) -> None:
        self._loader = loader
        self._after = after

    def __getattr__(self, name: str):  # get_source, get_data, is_package and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._after()


class PostImportHooks(MetaPathFinder):
    """Callbacks by module name. One instance stands in `sys.meta_path` for as long as the process lives."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._lock = threading.Lock()
        self._searching = threading.local()

    def when_imported(self, name: str, callback: Callback) -> None:
        """Call `callback()` at the end of the first import of module `name`, or now if that has happened.

        If another thread is in the middle of that import, this waits for it. What a callback raises ends the import
        of `name` with that error, or this call.
        """
        with self._lock:
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            late = name in sys.modules
            if not late:
                self._callbacks.setdefault(name, []).append(callback)
        if late:
            importlib.import_module(name)
            callback()

    def _run(self, name: str) -> None:
        with self._lock:
            callbacks = self._callbacks.pop(name, [])
        for callback in callbacks:
            callback()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._callbacks or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname  # the search below comes through here again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = HookedLoader(spec.loader, lambda: self._run(fullname))
        return spec


hooks = PostImportHooks()
when_imported = hooks.when_imported
