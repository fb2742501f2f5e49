"""Check an environment: Gymnasium's own checker, then ours.

    python tools/check_env.py sinkflex/tau2-telecom-v0
    python tools/check_env.py my_package.envs:my-env-v0 --task 7 --turn "Hello." --turn "Goodbye."

Prints one line for each checker; exits with 1 and says what was expected and what was found.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(arguments: list[str] | None = None) -> int:
    """Check the environment that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("id", help="Gymnasium id, with MODULE: before it to import that first")
    parser.add_argument("--task", help="a task of it; by default one that reset draws")
    parser.add_argument("--domain", help="of that task, where the environment has several")
    parser.add_argument(
        "--turn", action="append", help="an agent turn, repeatable: played in turn until the end"
    )
    options = parser.parse_args(arguments)
    import gymnasium
    from gymnasium.utils.env_checker import check_env as gymnasium_check

    import components.envs
    from components.envs.check import check_env

    components.envs.register()
    try:
        env = gymnasium.make(options.id, disable_env_checker=True).unwrapped
        task, domain = options.task, options.domain
        if task is None:
            task, domain = _drawn_task(env)
        with warnings.catch_warnings():
            # Texts have no shape or dtype, about which Gymnasium only warns.
            warnings.simplefilter("ignore")
            gymnasium_check(env, skip_render_check=True)
        print(f"gymnasium.utils.env_checker: {options.id} passes")
        env = gymnasium.make(options.id, disable_env_checker=True).unwrapped
        turns = options.turn or ("Hello.",)
        check_env(env, task_id=task, turns=turns, domain=domain)  # type: ignore[arg-type]
        print(f"components.envs.check: {options.id} passes on task {task}")
    except (AssertionError, ValueError, gymnasium.error.Error) as error:
        print(f"{options.id}: {error}", file=sys.stderr)
        return 1
    return 0


def _drawn_task(env: object) -> tuple[str, str]:
    """Id and domain of the task that reset draws."""
    _, info = env.reset(seed=0)  # type: ignore[attr-defined]
    task = info.get("task")
    if task is None:
        raise ValueError("info['task'] of reset is missing: name a task with --task")
    return str(task.id), str(task.domain)


if __name__ == "__main__":
    sys.exit(main())
