"""A real OpenEnv server: press the word that the goal names, by its number or at its place. Prints its port.

    python tests/openenv_site.py [sessions]

Tasks: "press"; "say", whose end is an answer; "crash", which breaks at its first step.
"""

from __future__ import annotations

import base64
import io
import random
import re
import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from PIL import Image

WORDS = ("Send", "Open", "Next", "Stop", "Save", "Mail")


class TextAction(Action):
    action_str: str


class Seen(Observation):
    text: str = ""
    goal: str = ""
    url: str = ""
    screenshot: str = ""
    error: str = ""


class Press(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, task_name: str = "press") -> Seen:
        if task_name not in ("press", "say", "crash"):
            raise ValueError(f"no task {task_name}")
        self.task = task_name
        self.words = random.Random(seed).sample(WORDS, 3)
        self.wanted = random.Random(f"{seed}/wanted").randrange(3)
        self._state = State(step_count=0)
        return self._seen()

    def step(self, action: TextAction) -> Seen:
        self._state.step_count += 1
        if self.task == "crash":
            raise RuntimeError("the desktop is gone")
        said = action.action_str
        if found := re.fullmatch(r"click\('(\d+)'\)", said):
            return self._pressed(int(found[1]) - 1)
        if found := re.fullmatch(r"mouse_click\(([\d.]+), [\d.]+\)", said):
            return self._pressed(int(float(found[1])) // 50)
        if found := re.fullmatch(r"send_msg_to_user\('(.*)'\)", said):
            right = self.task == "say" and found[1] == self.words[self.wanted]
            return self._seen(done=True, reward=float(right))
        return self._seen(error=f"{said} is not understood")

    def _pressed(self, place: int) -> Seen:
        if self.task == "say" or not 0 <= place < 3:
            return self._seen(error="nothing happens")
        return self._seen(done=True, reward=float(place == self.wanted))

    def _seen(self, **more) -> Seen:
        text = "\n".join(f"{word} {number} <button>" for number, word in enumerate(self.words, start=1))
        picture = io.BytesIO()
        Image.new("RGB", (150, 60), (0, 80 * self.wanted, 0)).save(picture, "PNG")
        shown = base64.b64encode(picture.getvalue()).decode()
        goal = f'{"Say" if self.task == "say" else "Press"} "{self.words[self.wanted]}"'
        return Seen(text=text, goal=goal, url="app://press", screenshot=shown, **more)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Press, TextAction, Seen, max_concurrent_envs=int(sys.argv[1]) if sys.argv[1:] else 4)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
