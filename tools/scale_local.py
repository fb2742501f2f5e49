"""A model of rollouts on the local engine, for ``simulate_scale.py``: each rank has one of its own.

When an answer of an environment enters is counted in forward passes, as in
``components/rollout/stream.py``: ``reply_delay`` passes after its turn has ended, or at once where
nothing else is left to sample. The engine waits for it then, and meanwhile nothing is sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from tools.scale_model import Costs, Episode, Played


class _Rank:
    """One rank's rollouts and its engine; episodes go by their index."""

    def __init__(
        self, episodes: Sequence[Episode], costs: Costs, *, workers: int, reply_delay: int
    ) -> None:
        self.episodes = [episode for episode in episodes if episode.turns]
        self.costs, self.reply_delay = costs, reply_delay
        self.now = self.busy_s = self.env_s = 0.0
        self.quarter: float | None = None
        self.prefilled = self.decode_steps = self.decode_tokens = 0
        self._passes = 0
        self._waiting = deque(range(len(self.episodes)))
        self._num_ended, self._num_free = 0, workers
        self._turns = [0] * len(self.episodes)
        """Turns that have ended."""
        self._due: dict[int, tuple[int, float]] = {}
        """Where the environment is at work: the pass of its answer, and when it has one."""
        self._live: dict[int, int] = {}
        """Where a turn is under way: tokens that it still needs."""

    def play(self) -> None:
        """Play all to their end."""
        while True:
            entering = self._take_answers()
            if entering:
                self._prefill(entering)
            elif self._live:
                self._decode()
            else:
                return

    def _take_answers(self) -> list[int]:
        """Wait for the answers that are due; who samples a turn next."""
        entering: list[int] = []
        while True:
            while self._waiting and self._num_free:
                self._num_free -= 1
                self._ask(self._waiting.popleft())
            if self._due and not (entering or self._live):  # nothing moves the clock but these
                self._passes = max(self._passes, min(number for number, _ in self._due.values()))
            taken = [index for index, (number, _) in self._due.items() if number <= self._passes]
            if not taken:
                return entering
            seconds = max(self._due.pop(index)[1] for index in taken) - self.now
            if seconds > 0:
                self.now += seconds
                self.env_s += seconds
            for index in taken:
                if self._turns[index] < len(self.episodes[index].turns):
                    entering.append(index)
                else:
                    self._end()

    def _ask(self, index: int) -> None:
        """An environment goes to work: on its reset, or on a turn that has ended."""
        episode, turn = self.episodes[index], self._turns[index]
        env_s = episode.turns[turn].env_s if turn < len(episode.turns) else episode.end_s
        self._due[index] = (self._passes + self.reply_delay, self.now + env_s)

    def _end(self) -> None:
        self._num_free += 1
        self._num_ended += 1
        if self.quarter is None and len(self.episodes) - self._num_ended <= len(self.episodes) / 4:
            self.quarter = self.now

    def _prefill(self, entering: Sequence[int]) -> None:
        """One pass over the new tokens, which samples the first of each turn."""
        turns = [self.episodes[index].turns[self._turns[index]] for index in entering]
        tokens = sum(turn.new_tokens for turn in turns)
        if not self.prefilled:
            tokens += self.costs.shared_tokens
        self.prefilled += tokens
        self._live |= {i: turn.sampled_tokens for i, turn in zip(entering, turns, strict=True)}
        self._advance(entering, passes=1, seconds=self.costs.prefill_token_s * tokens)

    def _decode(self) -> None:
        """Steps of all turns under way, until one ends or an answer is due."""
        steps = min(self._live.values())
        if self._due:
            steps = min(steps, min(number for number, _ in self._due.values()) - self._passes)
        live = list(self._live)
        self.decode_steps += steps
        self.decode_tokens += steps * len(live)
        step_s = self.costs.decode_step_s + self.costs.decode_token_s * len(live)
        self._advance(live, passes=steps, seconds=steps * step_s)

    def _advance(self, sampled: Sequence[int], *, passes: int, seconds: float) -> None:
        """Each pass has sampled a token of each of these."""
        self._passes += passes
        self.now += seconds
        self.busy_s += seconds
        for index in sampled:
            self._live[index] -= passes
            if self._live[index] == 0:
                del self._live[index]
                self._turns[index] += 1
                self._ask(index)


def play_local(
    episodes: Sequence[Sequence[Episode]], costs: Costs, *, workers: int, reply_delay: int
) -> Played:
    """Play a batch on the local engine.

    Args:
        episodes: of each rank.
        costs: measured seconds.
        workers: rollouts alive at once on each rank.
        reply_delay: passes from the end of a turn until its answer is waited for.
    """
    ranks = [_Rank(part, costs, workers=workers, reply_delay=reply_delay) for part in episodes]
    for rank in ranks:
        rank.play()
    return Played(
        seconds=max(rank.now for rank in ranks),
        server_busy_s=fmean(rank.busy_s for rank in ranks),
        env_s=fmean(rank.env_s for rank in ranks),
        tail_s=fmean(rank.now - (rank.quarter or 0.0) for rank in ranks),
        prefill_tokens=sum(rank.prefilled for rank in ranks),
        decode_steps=sum(rank.decode_steps for rank in ranks),
        decode_tokens=sum(rank.decode_tokens for rank in ranks),
    )
