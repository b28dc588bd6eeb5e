"""What can go wrong between us and a page, told apart by who can have caused it."""

from __future__ import annotations


class BrowserError(RuntimeError):
    """The browser or the page failed. As far as we can tell no policy caused it: the episode is `env_error`."""


class PageDied(BrowserError):
    """The page crashed, hangs, was closed, or its browser is gone. The page is of no further use."""


class PageNotReady(BrowserError):
    """A page did not load, or did not become what the task needs, within its time."""


class ActionFailed(Exception):
    """The page is alive but the action could not be done. The message goes back to the policy as feedback."""
