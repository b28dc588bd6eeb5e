"""The roundup tracker as a site: tickets to file, change, comment on and read, behind a login.

`TRACKER` is what a task set needs to know; `App` runs in the server process (see site_server.py). A tracker is made
once, empty but for its people. An episode's own is a copy in which twelve issues are created, drawn from the seed: what
they are about, how they stand, who works on them. A task is done if the tracker holds exactly what was asked for:
nothing less, and no other issue or comment than before.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webagent_core.tasks.site import PEOPLE, SiteKind, log_in, same_answer

PRIORITIES = ("critical", "urgent", "bug", "feature", "wish")
STATUSES = ("unread", "deferred", "chatting", "need-eg", "in-progress", "testing", "done-cbb")  # in the list of all
_THINGS = ("Printer", "Login page", "Search box", "Backup", "Scanner", "Calendar", "Mail server", "Invoice form",
           "Door sensor", "Phone list", "Wiki", "Camera", "Report", "Projector", "Lift", "Badge reader")  # fmt: skip
_TROUBLES = ("is slow", "jams", "shows an old date", "is offline", "loses settings", "needs a new cable",
             "prints twice", "cannot be reached", "is too loud", "has a wrong colour")  # fmt: skip
_COMMENTS = ("Seen again on Monday", "A new part is ordered", "Works after a restart", "Nobody else has this",
             "Please send a picture", "The supplier was called")  # fmt: skip
_ISSUES = 12


@dataclass
class Issue:
    title: str
    status: str
    priority: str
    assignedto: str | None
    comments: list[str] = field(default_factory=list)


@dataclass
class Asked:
    """A task of an episode: its words, and how the issues stand when it is done.

    Args:
        loose: title of the issue whose status may be any: the tracker sets it by itself when somebody comments.
        answer: what is to be said at the end.
    """

    goal: str
    issues: list[Issue]
    loose: str | None = None
    answer: str | None = None


def draw_issues(rng: random.Random) -> list[Issue]:
    people = [*PEOPLE, None]
    return [
        Issue(f"{thing} {rng.choice(_TROUBLES)}", rng.choice(STATUSES), rng.choice(PRIORITIES), rng.choice(people))
        for thing in rng.sample(_THINGS, _ISSUES)
    ]


def _file_issue(issues: list[Issue], rng: random.Random) -> Asked:
    taken = {issue.title.split()[0] for issue in issues}
    thing = rng.choice([thing for thing in _THINGS if thing.split()[0] not in taken])
    new = Issue(f"{thing} {rng.choice(_TROUBLES)}", "unread", rng.choice(PRIORITIES), None)
    goal = f'create a new issue with the title "{new.title}" and the priority "{new.priority}"'
    return Asked(goal, [*issues, new])


def _change_status(issues: list[Issue], rng: random.Random) -> Asked:
    issue = rng.choice(issues)
    issue.status = rng.choice([status for status in STATUSES if status != issue.status])
    return Asked(f'change the status of the issue "{issue.title}" to "{issue.status}"', issues)


def _comment(issues: list[Issue], rng: random.Random) -> Asked:
    issue = rng.choice(issues)
    issue.comments = [rng.choice(_COMMENTS)]
    goal = f'add to the issue "{issue.title}" the comment "{issue.comments[0]}"'
    return Asked(goal, issues, loose=issue.title)


def _reassign(issues: list[Issue], rng: random.Random) -> Asked:
    issue = rng.choice(issues)
    issue.assignedto = rng.choice([person for person in PEOPLE if person != issue.assignedto])
    issue.priority = rng.choice([priority for priority in PRIORITIES if priority != issue.priority])
    goal = f'assign the issue "{issue.title}" to "{issue.assignedto}" and change its priority to "{issue.priority}"'
    return Asked(goal, issues)


def _resolve(issues: list[Issue], rng: random.Random) -> Asked:
    issue = rng.choice(issues)
    issue.status, issue.comments = "resolved", [rng.choice(_COMMENTS)]
    goal = f'change the status of the issue "{issue.title}" to "resolved" with the comment "{issue.comments[0]}"'
    return Asked(goal, issues)


def _read_priority(issues: list[Issue], rng: random.Random) -> Asked:
    issue = rng.choice(issues)
    return Asked(f'answer with the priority of the issue "{issue.title}"', issues, answer=issue.priority)


_TASKS: dict[str, Callable[[list[Issue], random.Random], Asked]] = {
    "file-issue": _file_issue,
    "change-status": _change_status,
    "comment": _comment,
    "reassign": _reassign,
    "resolve": _resolve,
    "read-priority": _read_priority,
}

TRACKER = SiteKind("tracker/", __name__, "roundup", tuple(_TASKS))


def task_of(name: str, seed: int) -> tuple[list[Issue], Asked]:
    """The issues that an episode begins with, and what is asked of it: fixed by the task's name and seed."""
    rng, again = (random.Random(f"{name}/{seed}") for _ in range(2))
    issues = draw_issues(rng)
    asked = _TASKS[name](draw_issues(again), rng)
    person = rng.choice(list(PEOPLE))
    asked.goal = log_in(person, PEOPLE[person], asked.goal)
    return issues, asked


# ------------------------------------------------------------------------------------- in the server process


class App:
    """See `site_server.App`."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._running: dict[str, tuple[Any, Asked]] = {}  # by episode
        self._empty = folder / "empty"
        self._make_empty()

    def _make_empty(self) -> None:
        from roundup import admin, configuration, init, instance, password

        config = configuration.CoreConfig()
        for option, value in {
            "TRACKER_HOME": str(self._empty),
            "TRACKER_WEB": self.address,
            "MAIL_DOMAIN": "localhost",
            "DATABASE": "db",
            "RDBMS_BACKEND": "sqlite",
            "PASSWORD_PBKDF2_DEFAULT_ROUNDS": 1000,  # nobody's secrets, and the default takes a core for 0.1 s
            "WEB_LOGIN_ATTEMPTS_MIN": 0,  # no pause after mistyped passwords: it would be measured by the clock
        }.items():
            config[option] = value
        init.install(str(self._empty), admin.AdminTool().listTemplates()["classic"]["path"])
        (self._empty / "detectors" / "nosyreaction.py").unlink()  # sends mail
        # Of guests: what there is to read is behind the login.
        schema = self._empty / "schema.py"
        text = schema.read_text("utf-8")
        of_guests = "db.security.addPermissionToRole('Anonymous', 'View', cl)"
        if of_guests not in text:
            raise RuntimeError(f"{schema} is not the schema of roundup 2.6: it has no {of_guests!r}")
        schema.write_text(text.replace(of_guests, "pass"), "utf-8")
        page = self._empty / "html" / "page.html"  # the one link that leads out of the tracker
        page.write_text(page.read_text("utf-8").replace("https://www.roundup-tracker.org", "#"), "utf-8")
        config.save(str(self._empty / "config.ini"))
        tracker = instance.open(str(self._empty))
        tracker.init(password.Password("admin", config=config))
        with closing(tracker.open("admin")) as db:
            for name, secret in PEOPLE.items():
                hidden = password.Password(secret, config=config)
                db.user.create(username=name, password=hidden, address=f"{name}@localhost", roles="User")
            db.commit()

    def begin(self, episode: str, task: str, seed: int) -> dict[str, Any]:
        from roundup.cgi.wsgi_handler import RequestDispatcher

        issues, asked = task_of(task, seed)
        home = self.folder / episode
        shutil.copytree(self._empty, home)
        dispatcher = RequestDispatcher(str(home))
        with closing(dispatcher.tracker.open("admin")) as db:
            for issue in issues:
                given = {"assignedto": db.user.lookup(issue.assignedto)} if issue.assignedto else {}
                for name in ("status", "priority"):
                    given[name] = db.getclass(name).lookup(getattr(issue, name))
                db.issue.create(title=issue.title, **given)
            db.commit()
        self._running[episode] = dispatcher, asked
        return {"goal": asked.goal, "start": ""}

    def application(self, episode: str) -> Callable[..., Iterable[bytes]]:
        return self._running[episode][0]

    def judge(self, episode: str, answer: str | None) -> dict[str, Any]:
        asked = self._running[episode][1]
        wrong = differences(asked, read_issues(self.folder / episode / "db" / "db"))
        if asked.answer is not None and not same_answer(answer, asked.answer):
            wrong.append(f"the answer is {asked.answer!r}")
        return {"reward": 0.0 if wrong else 1.0, "detail": "; ".join(wrong[:3])}

    def end(self, episode: str) -> None:
        self._running.pop(episode, None)
        shutil.rmtree(self.folder / episode, ignore_errors=True)


def read_issues(database: Path) -> list[Issue]:
    """The issues of a tracker's database, in the order they were created."""
    query = """
        select i.id, i._title, s._name, p._name, u._username from _issue i
        left join _status s on s.id = i._status left join _priority p on p.id = i._priority
        left join _user u on u.id = i._assignedto where i.__retired__ = 0 order by i.id"""
    said = """
        select m._summary from issue_messages l join _msg m on m.id = l.linkid
        where l.nodeid = ? and m.__retired__ = 0 order by m.id"""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return [Issue(*row, [text for (text,) in db.execute(said, (number,))]) for number, *row in db.execute(query)]


def differences(asked: Asked, found: list[Issue]) -> list[str]:
    """How the issues found are not as asked, in words; [] if they are."""
    wanted = {issue.title: issue for issue in asked.issues}
    wrong = [f'"{title}" is not there' for title in wanted if title not in {issue.title for issue in found}]
    for number, issue in enumerate(found):
        other = wanted.get(issue.title)
        if other is None or issue.title in {earlier.title for earlier in found[:number]}:
            wrong.append(f'"{issue.title}" is one too many')
            continue
        for name in ("status", "priority", "assignedto", "comments"):
            if getattr(issue, name) != getattr(other, name) and (name, issue.title) != ("status", asked.loose):
                wrong.append(f'"{issue.title}": {name} is {getattr(issue, name)!r}, not {getattr(other, name)!r}')
    return wrong
