"""What broken tools do to rollouts: nothing, except to their own episodes.

    python tools/stress_rollouts.py [--episodes 1000] [--rate 0.3] [--seed 0] [--json FILE]
    python tools/stress_rollouts.py --quick        # 120 episodes: under 2 minutes

Plays scripted episodes of tau2-bench mock twice in worker processes: as they are, and with a fault
in the first tool call of some (``tools/stress_faults.py``), drawn from the rollout id. Prints a
table of faults and statuses, and exits with 1 if one of these does not hold:

    statuses     every episode ends in one status, and each fault in the one that is due to it
    sound        episodes without a fault are identical in both runs: ids, rewards, messages
    leftovers    as many processes, threads and file descriptors afterwards as before
    hung         a step of 8 of which one hangs takes no longer than its deadline allows

It needs Linux: it counts in /proc.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.chat.hermes import HermesRenderer
from components.data.oracles import mock_oracle, play
from components.policy.engine import Feed, in_rounds
from components.rollout.agent_loop import Limits
from components.rollout.specs import derive_seed
from components.rollout.types import RolloutSpec, SampleFailure, SampleRequest, SampleResult
from components.rollout.workers import Failure, WorkerPool
from tools.stress_checks import (
    adopted_orphans,
    census,
    differences,
    open_things,
    wrong_ends,
)
from tools.stress_faults import FAULTS, FaultyEnv, draw_faults

NUM_TASKS = 64
LIMITS = Limits(max_turns=24, max_turn_tokens=1024, max_tokens=16_384, max_refused=2)
SLACK_S = 2.0
"""What a step may take beyond its deadline: killing, and a busy machine."""


class ScriptedEngine:
    """Says the turns of a script, and the last of them again where it has ended.

    Args:
        script: sampled turns by rollout id.
    """

    policy_version = 0

    def __init__(self, script: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        self._script = script
        self._num_said: Counter[str] = Counter()

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult | SampleFailure]:
        """The next turn of each request's rollout."""
        return in_rounds(lambda some: [self._next(r.rollout_id) for r in some], requests, feed)

    def _next(self, rollout_id: str) -> SampleResult:
        turns = self._script[rollout_id]
        ids = turns[min(self._num_said[rollout_id], len(turns) - 1)]
        self._num_said[rollout_id] += 1
        return SampleResult(
            ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", policy_version=0
        )

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Forget these rollouts."""
        for rollout_id in rollout_ids:
            self._num_said.pop(rollout_id, None)

    def sync(self, policy_version: int) -> dict[str, float]:
        """There are no weights."""
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is played, and how."""

    episodes: int
    rate: float
    seed: int
    num_workers: int = 8
    tool_timeout_s: float = 1.0
    env_timeout_s: float = 5.0
    worker_memory_mib: int = 512

    def __post_init__(self) -> None:
        if self.episodes < 8:
            raise ValueError(f"episodes={self.episodes}: must be at least 8, for the hung one of 8")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate={self.rate}: must be from 0 to 1")


def stress(settings: Settings) -> dict[str, Any]:
    """Play all, and report.

    Returns:
        ``faults`` (fault -> status -> episodes; ``none`` for the sound ones), ``seconds``,
        ``before`` and ``after`` (what was open), ``hung``, and ``problems``: what did not hold.
    """
    specs = make_specs(settings)
    plan = draw_faults(specs, settings.rate)
    finished: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, adopted_orphans() as reap:
        open_pool = partial(faulty_pool, settings, _tokenizer(directory))
        with open_pool({}, num_workers=1) as first:  # starts the forkserver, which stays
            make_script(first, specs[:1])
        before, open_before = census(), Counter(open_things())
        with open_pool({}) as sound:
            script = make_script(sound, specs)
            expected = sound.run(specs, ScriptedEngine(script))
        start = time.monotonic()
        with open_pool(plan) as faulty:
            rollouts = faulty.run(
                specs,
                ScriptedEngine(script),
                on_done=lambda rollout: finished.update([rollout.spec.rollout_id]),
            )
        seconds = time.monotonic() - start
        hung = one_hung_of_eight(partial(open_pool, num_workers=8), script, specs[:8])
        reap()
        after, open_after = census(), Counter(open_things())
    problems = wrong_ends(specs, rollouts, finished, plan) + differences(expected, rollouts, plan)
    problems += [
        f"{name}: {before[name]} before, {after[name]} after"
        for name in before
        if before[name] != after[name]
    ]
    if before != after:
        problems += [f"left over: {thing}" for thing in (open_after - open_before).elements()]
    allowed = hung["without_s"] + settings.env_timeout_s + SLACK_S
    if hung["with_s"] > allowed or hung["lost"] != 1:
        problems.append(f"one hung of 8, allowed {allowed:.1f} s and 1 lost: {hung}")
    table: dict[str, Counter[str]] = {name: Counter() for name in ("none", *FAULTS)}
    for rollout in rollouts:
        table[plan.get(rollout.spec.env_seed, "none")][rollout.status] += 1
    return {
        "settings": dataclasses.asdict(settings),
        "faults": {name: dict(counts) for name, counts in table.items()},
        "seconds": seconds,
        "before": before,
        "after": after,
        "hung": hung,
        "problems": problems,
    }


def make_specs(settings: Settings) -> list[RolloutSpec]:
    """Orders; here no two episodes share an environment seed, which says what goes wrong."""
    from components.envs.tau2 import task_ids

    ids = task_ids("mock", "train", tasks=f"generated:{settings.seed}:{NUM_TASKS}")
    specs = []
    for number in range(settings.episodes):
        name = f"stress/{settings.seed}/{number}"
        specs.append(
            RolloutSpec(
                rollout_id=name,
                task_id=ids[number % len(ids)],
                domain="mock",
                group=number,
                member=0,
                seed=derive_seed(settings.seed, name),
                env_seed=derive_seed(settings.seed, "env", name),
            )
        )
    return specs


def _tokenizer(directory: str) -> str:
    from tests.tiny import tiny_tokenizer_dir

    return str(tiny_tokenizer_dir(Path(directory)))


def faulty_pool(
    settings: Settings,
    tokenizer_dir: str,
    plan: Mapping[int, str],
    *,
    num_workers: int | None = None,
) -> WorkerPool:
    """Workers in whose environments the planned faults happen."""
    return WorkerPool(
        make_env=partial(
            FaultyEnv,
            plan=plan,
            domain="mock",
            tasks=f"generated:{settings.seed}:{NUM_TASKS}",
            tool_timeout_s=settings.tool_timeout_s,
        ),
        make_renderer=partial(HermesRenderer, tokenizer_dir),
        limits=LIMITS,
        temperature=1.0,
        num_workers=num_workers or settings.num_workers,
        env_timeout_s=settings.env_timeout_s,
        preload=("components.envs.tau2_data:preload:mock",),
        worker_memory_mib=settings.worker_memory_mib,
    )


def make_script(pool: WorkerPool, specs: Sequence[RolloutSpec]) -> dict[str, list[tuple[int, ...]]]:
    """The demonstrator's turns of each episode, played without faults."""
    script = {}
    for rollout in pool.run_local(play, [(spec, mock_oracle) for spec in specs]):
        if isinstance(rollout, Failure) or not rollout.valid:
            raise RuntimeError(f"a demonstration failed: {rollout.error}")
        ids = rollout.tokens.ids
        script[rollout.spec.rollout_id] = [ids[start:end] for start, end in rollout.turns]
    return script


def one_hung_of_eight(
    open_pool: Callable[[Mapping[int, str]], WorkerPool],
    script: Mapping[str, Sequence[tuple[int, ...]]],
    specs: Sequence[RolloutSpec],
) -> dict[str, float]:
    """A step of 8 as it is, and with one that nothing but its deadline ends.

    Returns:
        ``without_s`` and ``with_s``: how long it took; ``lost``: episodes without a reward.
    """
    seconds, lost = [], 0
    for plan in ({}, {specs[3].env_seed: "burn_deaf"}):
        with open_pool(plan) as pool:
            pool.run_local(ready, specs)  # all are up: the clock is the step's alone
            start = time.monotonic()
            rollouts = pool.run(specs, ScriptedEngine(script))
            seconds.append(time.monotonic() - start)
            lost = sum(not rollout.valid for rollout in rollouts)
    return {"without_s": seconds[0], "with_s": seconds[1], "lost": lost}


def ready(env: Any, renderer: Any, item: Any) -> None:
    """Nothing: a worker that answers has started."""


def show(report: Mapping[str, Any]) -> None:
    """Print the table."""
    names = sorted({status for counts in report["faults"].values() for status in counts})
    print(f"{'fault':12}" + "".join(f"{name:>21}" for name in names))
    for fault, counts in report["faults"].items():
        print(f"{fault:12}" + "".join(f"{counts.get(name, 0):21}" for name in names))
    hung = report["hung"]
    print(f"with faults: {report['seconds']:.1f} s")
    print(f"a step of 8: {hung['without_s']:.2f} s; with one hung {hung['with_s']:.2f} s")
    print(f"before: {report['before']}\nafter:  {report['after']}")
    for problem in report["problems"]:
        print(f"PROBLEM {problem}")
    print(f"{len(report['problems'])} problems")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stress test that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.3, help="share of episodes with a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="120 episodes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there too")
    options = parser.parse_args(arguments)
    try:
        settings = Settings(
            episodes=120 if options.quick else options.episodes,
            rate=options.rate,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    report = stress(settings)
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    # Workers import this module by its name; what lives in __main__ they could not.
    from tools import stress_rollouts

    sys.exit(stress_rollouts.main())
