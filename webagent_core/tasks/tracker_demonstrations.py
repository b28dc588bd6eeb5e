"""Scripted demonstrators for the tasks of the tracker (see tracker.py): rules from (goal, page) to the next move."""

from __future__ import annotations

import re

from webagent_core.tasks.moves import Element, Move, click, has, log_in, named, of_kind, quoted, select, stop, type_into

# Fields of an issue's form have no names of their own; the page has them in this order, below the two of its frame.
_TITLE = 2  # of the text fields
_PRIORITY, _STATUS, _ASSIGNED_TO = 0, 1, 2  # of the lists


def _fill(page: list[Element], wanted: dict[int, str], note: str | None, button: str) -> Move:
    """Choose in the lists, write the note, send the form."""
    for place, option in wanted.items():
        field = of_kind(page, "select")[place]
        if field.value != option:
            return select(field, option)
    if note is not None:
        field = of_kind(page, "textarea")[0]
        if field.value != note:
            return type_into(field, note)
    return click(named(page, button, "input submit"))


def _title(page: list[Element]) -> Element:
    return of_kind(page, "input text")[_TITLE]


def _file_issue(goal: str, page: list[Element]) -> Move:
    title, priority = quoted(goal)[2:]
    if move := log_in(goal, page, "Login"):
        return move
    if has(page, "Submit Changes") and _title(page).value == title:
        return stop()
    if not has(page, "Submit New Entry"):
        return click(named(page, "Create New", "link"))
    if _title(page).value != title:
        return type_into(_title(page), title)
    return _fill(page, {_PRIORITY: priority}, None, "Submit New Entry")


def _edit(goal: str, page: list[Element], title: str, wanted: dict[int, str], note: str | None = None) -> Move:
    """Find the issue, change it, and stop when the tracker has confirmed that."""
    if move := log_in(goal, page, "Login"):
        return move
    if not has(page, "Submit Changes") or _title(page).value != title:
        return click(named(page, title if has(page, title) else "Show All", "link"))
    if has(page, "clear this message"):  # it tells what was changed
        return stop()
    return _fill(page, wanted, note, "Submit Changes")


def _change_status(goal: str, page: list[Element]) -> Move:
    title, status = quoted(goal)[2:]
    return _edit(goal, page, title, {_STATUS: status})


def _comment(goal: str, page: list[Element]) -> Move:
    title, note = quoted(goal)[2:]
    return _edit(goal, page, title, {}, note)


def _reassign(goal: str, page: list[Element]) -> Move:
    title, person, priority = quoted(goal)[2:]
    return _edit(goal, page, title, {_PRIORITY: priority, _ASSIGNED_TO: person})


def _resolve(goal: str, page: list[Element]) -> Move:
    title, status, note = quoted(goal)[2:]
    return _edit(goal, page, title, {_STATUS: status}, note)


def _read_priority(goal: str, page: list[Element]) -> Move:
    title = re.search(r'the issue "(.*?)"', goal).group(1)
    if move := log_in(goal, page, "Login"):
        return move
    if not has(page, "Submit Changes") or _title(page).value != title:
        return click(named(page, title if has(page, title) else "Show All", "link"))
    return stop(of_kind(page, "select")[_PRIORITY].value)


TRACKER_DEMONSTRATORS = {
    "tracker/file-issue": _file_issue,
    "tracker/change-status": _change_status,
    "tracker/comment": _comment,
    "tracker/reassign": _reassign,
    "tracker/resolve": _resolve,
    "tracker/read-priority": _read_priority,
}
