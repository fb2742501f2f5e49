"""How fast the environments are, beside tau2-bench's own.

    python tools/bench_envs.py [--quick] [--json FILE]

The keys of the JSON file:

    retail_reset_ratio   constructing the stock retail environment, over our whole reset
    evaluation_ratio     the official evaluator on a retail episode, over ours of the same episode
    telecom_reset_ratio  reset of the stock Gymnasium environment of telecom, over ours
    episodes_per_s_1     retail episodes with the scripted user in one process
    episodes_per_s_2     the same in two processes
    rss_mb_256_retail    memory of a process with 256 live retail environments, each some calls in

Ratios are medians over medians, taken in turns. Where the evaluation of a task's first episode is
meant, which also runs its gold actions, the text output has it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.envs.base import Message, ToolCall

NUM_LIVE = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under 3 minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    repeats, seconds = (5, 5.0) if options.quick else (20, 30.0)
    figures = {
        "retail_reset_ratio": retail_reset(repeats),
        "evaluation_ratio": evaluation(repeats),
        "telecom_reset_ratio": telecom_reset(2 if options.quick else 5),
        "episodes_per_s_1": episodes_per_s(1, seconds),
        "episodes_per_s_2": episodes_per_s(2, seconds),
        "rss_mb_256_retail": in_process(_live_memory),
    }
    for name, value in figures.items():
        print(f"{name:22}{value:10.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _ratio(name: str, stock: Sequence[float], ours: Sequence[float]) -> float:
    slow, fast = statistics.median(stock), statistics.median(ours)
    print(f"{name}: stock {1e3 * slow:.1f} ms, ours {1e3 * fast:.2f} ms")
    return slow / fast


def retail_reset(repeats: int) -> float:
    """Stock construction over our reset, which has a task, a user and its first words as well."""
    from components.envs.tau2 import Tau2Env, task_ids
    from components.envs.tau2_data import load_tau2

    ids = task_ids("retail", "all")
    env = Tau2Env(domain="retail")
    env.reset(options={"task_id": ids[0]})
    constructor = load_tau2().get_env_constructor("retail")
    stock, ours = [], []
    for index in range(repeats):
        stock.append(_seconds(constructor))
        for task_id in ids[index::20]:
            ours.append(_seconds(lambda task_id=task_id: env.reset(options={"task_id": task_id})))
    return _ratio("retail reset", stock, ours)


def evaluation(repeats: int) -> float:
    """The official evaluator over ours, on episodes of the gold actions."""
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    from components.envs import tau2_score
    from components.envs.rewards import OfficialReward
    from components.envs.tau2 import Tau2Env, task_ids
    from components.envs.tau2_data import find_task

    stock, ours, first = [], [], []
    for task_id in task_ids("retail", "all")[: 4 * repeats : 4]:
        env = Tau2Env(domain="retail", user=_Talker)
        trajectory = _play(env, task_id)[1]
        environment = env.tau2_environment
        task = find_task("retail", task_id)

        def official(trajectory: Any = trajectory, task: Any = task) -> float:
            return evaluate_simulation(
                simulation=trajectory.official,
                task=task,
                evaluation_type=EvaluationType.ALL,
                solo_mode=False,
                domain="retail",
            ).reward

        def fast(trajectory: Any = trajectory, environment: Any = environment) -> float:
            parts = tau2_score.outcome(
                domain="retail",
                task_id=trajectory.task.id,
                environment=environment,
                messages=trajectory.official.messages,
            )
            return OfficialReward()(dataclasses.replace(trajectory, outcome=parts)).value

        if official() != fast():
            raise AssertionError(f"retail {task_id}: the two evaluations differ")
        stock.append(_seconds(official))
        ours.append(_seconds(fast))
        tau2_score.gold_digests.cache_clear()
        first.append(_seconds(fast))
    print(f"  first episode of a task: {1e3 * statistics.median(first):.2f} ms")
    return _ratio("retail evaluation", stock, ours)


def telecom_reset(repeats: int) -> float:
    """The stock Gymnasium environment over ours.

    The stock one is solo, because its user would need a model; ours has its scripted user, since
    alone it only starts the run with the agent's first turn.
    """
    from tau2.gym.gym_agent import AgentGymEnv

    from components.envs.tau2 import Tau2Env, task_ids

    ids = task_ids("telecom", "all")
    env = Tau2Env(domain="telecom")
    env.reset(options={"task_id": ids[0]})
    stock, ours = [], []
    for index in range(repeats):
        other = AgentGymEnv(domain="telecom", task_id=ids[index], solo_mode=True)
        stock.append(_seconds(other.reset))
        for task_id in ids[index::10]:
            ours.append(_seconds(lambda task_id=task_id: env.reset(options={"task_id": task_id})))
    return _ratio("telecom reset", stock, ours)


class _Talker:
    """Asks, and leaves when it hears a text."""

    def __init__(self, task: Any) -> None:
        self.replies = ["Hello, I need help.", "Thanks. ###STOP###"]

    def reply(self, agent_text: str) -> str:
        return self.replies.pop(0)


def _turns(task_id: str) -> list[str | Message]:
    """The gold actions, one call a turn."""
    from components.envs.tau2_data import find_task

    actions = find_task("retail", task_id).evaluation_criteria.actions or []
    calls = [
        ToolCall(id=f"call_{number}", name=action.name, arguments=action.arguments)
        for number, action in enumerate(actions)
    ]
    return [Message(role="assistant", tool_calls=(call,)) for call in calls]


def _play(env: Any, task_id: str) -> tuple[float, Any]:
    """An episode of the gold actions: (reward, trajectory)."""
    env.reset(seed=0, options={"task_id": task_id})
    turns = _turns(task_id)
    while True:
        turn = turns.pop(0) if turns else "It is done. Is there anything else?"
        _, reward, terminated, truncated, info = env.step(turn)
        if terminated or truncated:
            return reward, info["trajectory"]


def _count_episodes(seconds: float, barrier: Any, answers: Any) -> None:
    from components.envs.tau2 import Tau2Env, task_ids

    env = Tau2Env(domain="retail")
    ids = task_ids("retail", "train")
    _play(env, ids[0])
    barrier.wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        _play(env, ids[count % len(ids)])
        count += 1
    answers.put(count / (time.perf_counter() - start))


def episodes_per_s(num_processes: int, seconds: float) -> float:
    """Whole retail episodes a second: reset, gold calls, the scripted user's turns, evaluation."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(num_processes), context.SimpleQueue()
    processes = [
        context.Process(target=_count_episodes, args=(seconds, barrier, answers))
        for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a worker of the benchmark ended with {process.exitcode}")
    return sum(answers.get() for _ in processes)


def _live_memory(answers: Any) -> None:
    from components.envs.tau2 import Tau2Env, task_ids

    ids = task_ids("retail", "all")
    live = []
    for index in range(NUM_LIVE):
        env = Tau2Env(domain="retail")
        env.reset(seed=index, options={"task_id": ids[index % len(ids)]})
        for turn in _turns(ids[index % len(ids)])[:6]:
            env.step(turn)
        live.append(env)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            answers.put(int(line.split()[1]) / 1024)
    assert len(live) == NUM_LIVE


def in_process(function: Callable[[Any], None]) -> float:
    """What a function puts into its queue, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=function, args=(answers,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"a process of the benchmark ended with {process.exitcode}")
    return answers.get()


if __name__ == "__main__":
    sys.exit(main())
