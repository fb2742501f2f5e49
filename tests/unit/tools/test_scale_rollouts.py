"""Rollouts in the simulation: timelines worked out by hand, and the trainer's own stream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rollout import stream
from components.rollout.types import SampleRequest
from tools.scale_model import Costs, Episode, Turn
from tools.scale_steps import play

COSTS = Costs(prefill_token_s=0.01, decode_step_s=0.1)


def episode(*turns, end_s=0.0):
    """Turns as (new tokens, sampled tokens, seconds of the environment before)."""
    found = [
        Turn(new_tokens=new, sampled_tokens=sampled, env_s=env_s) for new, sampled, env_s in turns
    ]
    return Episode(turns=tuple(found), end_s=end_s, trained_tokens=0.0)


SHORT = episode((10, 3, 0.2), (5, 2, 0.35), end_s=0.3)
LONG = episode((20, 8, 0.1))


@pytest.mark.parametrize(
    ("reply_delay", "seconds", "env_s", "decode_steps"),
    [
        # Both resets until 0.2, 30 new tokens until 0.5, 2 steps until 0.7: SHORT's turn is over.
        # Its environment until 1.05, 5 new tokens until 1.1, 1 step until 1.2: over again.
        # Its last answer until 1.5; LONG has 1 + 2 + 1 of its 8 tokens, 4 more steps until 1.9.
        (0, 1.9, 0.2 + 0.35 + 0.3, 2 + 1 + 4),
        # As before until 0.7. 2 passes of LONG until 0.9, then the answer of 1.05 is due; its turn
        # until 1.2. 2 passes until 1.4, in which LONG ends (1 + 2 + 2 + 1 + 2); the last until 1.5.
        (2, 1.5, 0.2 + 0.15 + 0.1, 2 + 2 + 1 + 2),
        # As before until 0.7. LONG samples its last 5 until 1.2: nothing else is left to sample, so
        # the answer of 1.05 enters then. 5 new tokens, 1 step until 1.35, the last until 1.65.
        (100, 1.65, 0.2 + 0.3, 2 + 5 + 1),
        # A server: LONG enters at 0.1 and has a token at 0.3. SHORT's prompt of 0.2
        # enters then, until 0.4; 2 steps until 0.6. Its environment until 0.95, within LONG's 4th
        # step since, which ends at 1.0; 5 new tokens until 1.05, 1 step until 1.15: both are over,
        # LONG with 1 + 2 + 4 + 1. The last answer until 1.45.
        (None, 1.45, 0.1 + 0.3, 2 + 4 + 1),
    ],
)
def test_two_rollouts_by_hand(reply_delay, seconds, env_s, decode_steps):
    found = play([[SHORT, LONG]], COSTS, servers=1, workers=2, reply_delay=reply_delay)
    assert found.seconds == pytest.approx(seconds)
    assert found.env_s == pytest.approx(env_s)
    assert found.decode_steps == decode_steps
    assert found.server_busy_s == pytest.approx(0.35 + 0.1 * decode_steps)  # 35 new tokens
    assert found.seconds == pytest.approx(found.server_busy_s + found.env_s)
    assert found.tail_s == pytest.approx(0.0)  # the last of two alone is no more than a quarter


@pytest.mark.parametrize("reply_delay", [0, 3, None])
def test_a_longer_turn_holds_up_nobody(reply_delay):
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.1)
    short = episode((0, 11, 0.0), (0, 11, 0.0), (0, 11, 0.0))
    found = play(
        [[episode((0, 101, 0.0)), short, short]],
        costs,
        servers=1,
        workers=2,
        reply_delay=reply_delay,
    )
    # 100 steps, beside which the others have time for theirs, one after the other: 10.0 s. In
    # rounds it would be 10.0 + 1.0 + 1.0, and then 3 x 1.0 for the third.
    assert found.seconds == pytest.approx(10.0)


@pytest.mark.parametrize("reply_delay", [0, 2, None])
def test_environments_are_waited_for_by_whom_they_concern(reply_delay):
    """A rank's environment is another's business neither on its own engine nor on a server."""
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.1)
    slow, quick = episode((0, 11, 5.0)), episode((0, 11, 0.5))
    found = play([[slow], [quick]], costs, servers=2, workers=1, reply_delay=reply_delay)
    assert found.seconds == pytest.approx(6.0)
    assert found.env_s == pytest.approx((5.0 + 0.5) / 2)


def test_a_rollout_goes_to_the_server_that_has_the_fewest_now():
    long, short = episode((0, 101, 0.0)), episode((100, 1, 0.1))
    found = play([[long, short, short, short]], COSTS, servers=2, workers=2, reply_delay=None)
    # 100 steps; the others' prompts of 1.0 s each are computed beside them, on the other server.
    assert found.seconds == pytest.approx(10.0)


def test_steps_may_take_no_time():
    """A fit finds 0 where the steps do not tell the rates apart; arrivals meet such steps."""
    costs = Costs(prefill_token_s=0.01, decode_step_s=0.0)
    rollouts = [episode((0, 1, 0.0), (0, 1, 0.0)), episode((0, 2, 0.0)), episode((0, 9, 0.0))]
    found = play([rollouts], costs, servers=1, workers=3, reply_delay=None)
    assert (found.seconds, found.decode_tokens) == (0.0, 1 + 8)


def tokens_of(episodes, shared):
    """Those that must be computed: new ones, and a step for each sampled one but the first."""
    turns = [turn for each in episodes for turn in each.turns]
    return (
        shared + sum(turn.new_tokens for turn in turns),
        sum(turn.sampled_tokens - 1 for turn in turns),
    )


SECONDS = st.sampled_from([0.0, 0.05, 0.3, 2.0])
TURNS = st.tuples(st.integers(1, 20), st.integers(1, 12), SECONDS)
EPISODES = st.lists(
    st.builds(
        lambda turns, end_s: episode(*turns, end_s=end_s), st.lists(TURNS, max_size=4), SECONDS
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(EPISODES, min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0, 1, 4, None]),
    st.sampled_from([0.0, 0.1]),
)
def test_what_was_recorded_is_played_and_no_more(ranks, workers, servers, reply_delay, step_s):
    costs = Costs(prefill_token_s=0.01, decode_step_s=step_s)
    servers = servers if reply_delay is None else len(ranks)
    found = play(ranks, costs, servers=servers, workers=workers, reply_delay=reply_delay)
    everyone = [each for part in ranks for each in part]
    assert (found.prefill_tokens, found.decode_tokens) == tokens_of(everyone, 0)
    alone = [
        sum(t.env_s + 0.01 * t.new_tokens + step_s * (t.sampled_tokens - 1) for t in each.turns)
        + each.end_s * bool(each.turns)
        for each in everyone
    ]
    assert found.seconds >= max(alone, default=0.0) - 1e-9
    assert 0.0 <= found.env_s <= found.seconds + 1e-9


class Clock:
    """Of the trainer's stream, with an engine and environments whose seconds are known."""

    clocked = True

    def __init__(self, costs):
        self.costs, self.now, self.waited = costs, 0.0, 0.0
        self.prefilled = self.decode_steps = 0

    def release(self, ids):
        pass

    def generate(self, requests, *, feed):
        """The steps of ``LocalEngine``: new tokens of all that wait, or a token for all."""
        waiting, live, num = dict(enumerate(requests)), {}, len(requests)
        while waiting or live:
            if waiting:
                new = sum(len(request.context) for request in waiting.values())
                new += 0 if self.prefilled else self.costs.shared_tokens
                self.prefilled += new
                self.now += self.costs.prefill_token_s * new
                live |= {i: request.max_new_tokens for i, request in waiting.items()}
                sampled = list(waiting)
            else:
                self.decode_steps += 1
                self.now += self.costs.decode_step_s
                sampled = list(live)
            for i in sampled:
                live[i] -= 1
            done = [i for i in live if live[i] == 0]
            live = {i: left for i, left in live.items() if left}
            entering = feed([(i, None) for i in done])
            waiting = dict(enumerate(entering, num))
            num += len(entering)


class Desk:
    """A worker's slot, in the seconds of a ``Clock``."""

    def __init__(self, clock):
        self.clock = clock

    def send(self, order, *, timeout_s):
        if order[0] == "episode":
            self.spec, self.turn = order[1], 0
        else:
            self.turn += 1
        turns = self.spec.episode.turns
        self.is_over = self.turn == len(turns)
        env_s = self.spec.episode.end_s if self.is_over else turns[self.turn].env_s
        self.ready = self.clock.now + env_s

    @staticmethod
    def gather(slots, **_):
        for slot in slots:
            late = max(slot.ready - slot.clock.now, 0.0)
            slot.clock.waited += late
            slot.clock.now += late

    def take_reply(self):
        if self.is_over:
            return SimpleNamespace(spec=self.spec)
        turn = self.spec.episode.turns[self.turn]
        return SampleRequest(
            rollout_id=self.spec.rollout_id,
            context=(0,) * turn.new_tokens,
            shared_len=0,
            max_new_tokens=turn.sampled_tokens,
            stop_ids=frozenset(),
            temperature=1.0,
            seed=0,
        )


@settings(max_examples=150, deadline=None)
@given(EPISODES, st.integers(1, 5), st.sampled_from([0, 1, 2, 7]))
def test_the_local_engine_waits_as_the_stream_does(episodes, workers, reply_delay):
    """Step for step what ``components.rollout.stream`` does with an engine like the local one."""
    episodes = [each for each in episodes if each.turns]
    costs = Costs(prefill_token_s=0.01, decode_step_s=0.1, shared_tokens=30)
    clock = Clock(costs)
    orders = [
        ("episode", SimpleNamespace(rollout_id=str(i), episode=each), 1.0)
        for i, each in enumerate(episodes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "Slot", Desk)
        stream.Stream(
            orders,
            [Desk(clock) for _ in range(workers)],  # type: ignore[arg-type]
            clock,  # type: ignore[arg-type]
            timeout_s=1.0,
            reply_delay=reply_delay,
            on_done=lambda rollout: None,
            on_round=lambda: None,
        ).play()
    found = play([episodes], costs, servers=1, workers=workers, reply_delay=reply_delay)
    assert found.seconds == pytest.approx(clock.now)
    assert found.env_s == pytest.approx(clock.waited)
    assert (found.prefill_tokens, found.decode_steps) == (clock.prefilled, clock.decode_steps)
