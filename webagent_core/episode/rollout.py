"""Many episodes against one batched policy, in lockstep.

A trainer that holds the policy in its own process generates for a whole batch at once, and wants the same batches for
the same seed. So: as many episodes run as there are pages; each plays its page as fast as it can; when every running
episode waits for the policy, the requests go out as one batch, ordered by episode. An episode that ends makes room
for the next one in order, within the same round. Which rows share a batch then depends on what happened, never on
what was quick. """

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from webagent_core.episode.runner import ContextOverflow, EpisodeRunner, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.task import Task

# One answer a chat, in order. A ContextOverflow in place of an answer ends that episode alone.
GenerateBatch = Callable[[list[list[dict]]], list[Response | ContextOverflow]]
Progress = Callable[[Trajectory], None]


class EventLoopThread:
    """An asyncio loop in a thread of its own: where the browser lives while the trainer's thread computes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()

    def submit(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine):
        return self.submit(coroutine).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


def play(
    runner: EpisodeRunner,
    tasks: Sequence[Task],
    generate: GenerateBatch,
    loop: EventLoopThread,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Play one episode for each of `tasks` and return the trajectories in that order.

    `generate` is called in the calling thread; the episodes run on `loop`.
    """
    rounds: queue.Queue[list[tuple[list[dict], asyncio.Future]] | None] = queue.Queue()
    done = loop.submit(_play(runner, tasks, rounds, progress))
    done.add_done_callback(lambda _: rounds.put(None))
    try:
        while (batch := rounds.get()) is not None:
            responses = generate([messages for messages, _ in batch])
            for (_, future), response in zip(batch, responses, strict=True):
                future.get_loop().call_soon_threadsafe(_answer, future, response)
    except BaseException:
        done.cancel()
        raise
    return done.result()


def _answer(future: asyncio.Future, response: Response | ContextOverflow) -> None:
    if future.done():  # its episode ran out of time meanwhile
        return
    if isinstance(response, ContextOverflow):
        future.set_exception(response)
    else:
        future.set_result(response)


async def _play(runner, tasks, rounds, progress) -> list[Trajectory]:
    trajectories: list[Trajectory | None] = [None] * len(tasks)
    waiting: dict[int, tuple[list[dict], asyncio.Future]] = {}
    order = iter(range(len(tasks)))
    running = min(runner.pool.pages, len(tasks))

    def send_if_all_wait() -> None:
        if waiting and len(waiting) == running:
            rounds.put([waiting[index] for index in sorted(waiting)])
            waiting.clear()

    async def worker() -> None:
        nonlocal running
        for index in order:

            async def ask(messages: list[dict], index=index) -> Response:
                future = asyncio.get_running_loop().create_future()
                waiting[index] = (messages, future)
                send_if_all_wait()
                try:
                    return await future
                finally:
                    waiting.pop(index, None)

            trajectories[index] = await runner.run(tasks[index], ask)
            if progress:
                progress(trajectories[index])
        running -= 1
        send_if_all_wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(running):
            group.create_task(worker())
    return trajectories
