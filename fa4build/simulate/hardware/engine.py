"""Asynchronous operations as objects in queues, performed when the schedule says so.

An operation has stages (for a bulk store: read the source, then write the destination). Operations of one queue run
in order; queues are independent. Schedules: `eager` performs at issue, `late` only when nothing else can run,
`random` (seeded) in between.
"""

import random
from collections.abc import Callable

SCHEDULES = ("eager", "late", "random")


class AsyncOp:
    """One operation. `stages` are run in order, each once; `describe` says what it is, with its PTX line.

    `token`: its (component, count) in the clocks of the checks. `committed`: some thread closed a group that holds it.
    """

    __slots__ = ("committed", "describe", "stage", "stages", "token")

    def __init__(self, describe: str, stages: list[Callable[[], None]]):
        self.describe, self.stages, self.stage = describe, stages, 0
        self.token = None
        self.committed = False

    @property
    def has_read(self) -> bool:
        """The source may be overwritten."""
        return self.stage >= 1

    @property
    def is_done(self) -> bool:
        """All effects happened."""
        return self.stage == len(self.stages)

    def step(self) -> None:
        """Performs the next stage."""
        stage = self.stages[self.stage]
        self.stage += 1
        stage()


class Engine:
    """Queues of pending operations of one cluster."""

    def __init__(self, schedule: str, seed: int):
        self.schedule = schedule
        self.random = random.Random(seed)
        self.queues: dict[object, list[AsyncOp]] = {}
        self.completed = 0

    def submit(self, op: AsyncOp, queue: object = None) -> AsyncOp:
        """Accepts an operation; `queue` None is a queue of its own."""
        key = object() if queue is None else queue
        if self.schedule == "eager" and not self.queues.get(key):
            while not op.is_done:
                op.step()
            self.completed += 1
            return op
        self.queues.setdefault(key, []).append(op)
        return op

    def advance(self) -> bool:
        """Performs one stage of one pending operation; False if there is none. `late` takes the newest queue first."""
        if not self.queues:
            return False
        keys = list(self.queues)
        key = keys[-1] if self.schedule != "random" else self.random.choice(keys)
        queue = self.queues[key]
        op = queue[0]
        op.step()
        if op.is_done:
            queue.pop(0)
            self.completed += 1
            if not queue:
                del self.queues[key]
        return True

    def drift(self) -> None:
        """In the random schedule: now and then performs something while warps are running."""
        if self.schedule == "random":
            while self.queues and self.random.random() < 0.4:
                self.advance()

    def pending(self) -> list[AsyncOp]:
        """Operations not yet done."""
        return [op for queue in self.queues.values() for op in queue]
