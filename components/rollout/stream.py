"""Episodes under way: results of the engine go to their workers, and requests come back.

Time is logical: one tick for each step of the engine. An answer of a worker is due ``reply_delay``
ticks after it was asked for; it is waited for then, and not taken before. So which requests enter
when depends on the orders and the tokens alone, never on who was quick. An engine that is not
``clocked`` is the exception: it takes each answer when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from components.policy.engine import PolicyEngine
from components.rollout.episode import failed_rollout
from components.rollout.slot import Failure, Slot
from components.rollout.types import (
    Rollout,
    RolloutSpec,
    SampleFailure,
    SampleRequest,
    SampleResult,
)

Order = tuple[str, RolloutSpec, float]


class Stream:
    """Plays one episode for each order; ``feed`` is what an engine's ``generate`` takes.

    Args:
        orders: what a worker is told to begin; at most one of each rollout.
        slots: idle workers.
        engine: told to release each rollout that has ended. One that is not ``clocked`` waits for
            no worker while it has something to sample.
        timeout_s: seconds a worker may take to answer.
        reply_delay: ticks from an order or a result to its answer.
        on_done: called with each finished rollout.
        on_round: called at every tick, but for the last, and while answers are waited for.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        slots: Sequence[Slot],
        engine: PolicyEngine,
        *,
        timeout_s: float,
        reply_delay: int,
        on_done: Callable[[Rollout], object],
        on_round: Callable[[], None],
    ) -> None:
        self._orders = orders
        self._engine = engine
        self._clocked = getattr(type(engine), "clocked", True)
        self._timeout_s, self._reply_delay = timeout_s, reply_delay
        self._on_done, self._on_round = on_done, on_round
        self._tick = 0
        self._waiting = deque(range(len(orders)))
        self._free = deque(slots)
        self._live: dict[int, Slot] = {}  # by index of the order, as all that follows
        self._due: dict[int, int] = {}  # the tick of each answer that is to come
        self._asked: list[int] = []  # whose request has this number
        self._rollouts: dict[int, Rollout] = {}

    def play(self) -> list[Rollout]:
        """Play all; rollouts in the order of the orders."""
        requests = self.feed(())
        if requests:
            self._engine.generate(requests, feed=self.feed)
        if len(self._rollouts) != len(self._orders):
            raise TypeError(
                f"{type(self._engine).__name__}.generate returned before feed had given all "
                "requests: it has to call feed, and to go on while that gives any"
            )
        return [self._rollouts[index] for index in range(len(self._orders))]

    def feed(self, done: Sequence[tuple[int, SampleResult | SampleFailure]]) -> list[SampleRequest]:
        """Hand results to their workers and collect what is due; see ``components.policy.engine``.

        Args:
            done: results by the number of their request.

        Returns:
            Requests that enter now, in the order of the orders.
        """
        self._tick += 1
        for number, result in done:
            self._send(self._asked[number], ("sampled", result))
        requests: dict[int, SampleRequest] = {}
        while True:
            self._start_waiting()
            answered = self._gather()
            if not answered and not (self._waiting and self._next_slot()):
                break
            for index in answered:
                self._take_reply(index, requests)
        if self._live:
            self._on_round()
        numbers = sorted(requests)
        self._asked += numbers
        return [requests[index] for index in numbers]

    def _start_waiting(self) -> None:
        while self._waiting and (slot := self._next_slot()) is not None:
            self._free.remove(slot)
            index = self._waiting.popleft()
            self._live[index] = slot
            self._send(index, self._orders[index])

    def _next_slot(self) -> Slot | None:
        """Who takes the next order now, if anybody is free."""
        if not self._free or self._clocked or not self._live:
            return self._free[0] if self._free else None
        # The others go on while a new process starts.
        for slot in self._free:
            slot.revive()
        return next((slot for slot in self._free if slot.is_ready()), None)

    def _send(self, index: int, order: tuple) -> None:
        self._live[index].send(order, timeout_s=self._timeout_s)
        self._due[index] = self._tick + self._reply_delay

    def _gather(self) -> list[int]:
        """Whose answers are taken now, in order: none if the engine can go on without them."""
        if not self._due:
            return []
        sampling = len(self._live) > len(self._due)  # or about to be: it owes no answer
        slots = {index: self._live[index] for index in self._due}
        if not self._clocked:
            Slot.gather(
                slots.values(),
                first_only=True,
                patient=not sampling,
                until_ready=self._free if self._waiting else (),
                on_tick=self._on_round,
            )
            return sorted(index for index in self._due if self._live[index].answered)
        if not sampling:  # nothing moves the clock but these
            self._tick = max(self._tick, min(self._due.values()))
        now = sorted(index for index, tick in self._due.items() if tick <= self._tick)
        # The others' deadlines run, too: they are looked at in every tick, and taken when due.
        others = [slot for index, slot in slots.items() if index not in now]
        Slot.gather(
            [slots[index] for index in now],
            others=others,
            patient=bool(now),
            on_tick=self._on_round,
        )
        return now

    def _take_reply(self, index: int, requests: dict[int, SampleRequest]) -> None:
        del self._due[index]
        reply = self._live[index].take_reply()
        if isinstance(reply, SampleRequest):
            requests[index] = reply
            return
        if isinstance(reply, Failure):
            reply = failed_rollout(self._orders[index][1], reply.status, reply.error)
        self._rollouts[index] = reply
        self._free.append(self._live.pop(index))
        self._engine.release([reply.spec.rollout_id])
        self._on_done(reply)
