"""Does GRPO learn? Three arms, three seeds, one warm start, equal time, on two CPU cores.

    python tools/learning_study.py                    # all that is missing, in hours
    python tools/learning_study.py --only grpo_0      # one arm and seed
    python tools/learning_study.py --list

Arms: ``grpo`` (configs/mock_learn.yaml), ``sft`` (more supervised steps on the demonstrations of
the same training tasks, a learning rate that falls over the time there is) and ``reinforce`` (as
grpo, without a baseline). Each gets ``--minutes`` of training per seed, counted over its finished
steps, and starts from one warm start: the first checkpoint of configs/mock_learn_sft.yaml whose
official reward on validation tasks is at least 0.3; above 0.6 ends the study with an error. The
warm start and the last checkpoint of each arm and seed are evaluated on held-out generated tasks
and on the nine official ones (configs/mock_learn_eval.yaml).

Each result is written when it is there: ``recipes/results/mock_learn/ARM_SEED.json``, and the
summary over those so far, ``recipes/results/mock_learn.json``: ``seeds``, ``reward_before``,
``reward_after``, ``delta``, ``ci_low``, ``ci_high`` of GRPO on the held-out tasks; the same by set
of tasks for every arm (``change``) and for GRPO against each other arm (``comparison``). The
intervals are of a paired bootstrap over tasks and seeds. Stopped in whatever way, the same command
goes on; without its ``runs`` folder the warm start is made again, and has to come out the same.
An arm that ends with an error does not keep the others from being run.
Let it have the machine alone: an arm's budget is time, so what runs beside it takes its steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from components.disk import remove_tree, write_text
from components.rollout.study import BEFORE, none_fits, pick_warm_start, summary
from components.training.retention import MANIFEST, numbered
from tools.study_runs import execute, is_over, locked, machine, shown, step_seconds, tune

GRPO, SFT, EVAL = (f"configs/mock_learn{end}.yaml" for end in ("", "_sft", "_eval"))
ARMS: Mapping[str, tuple[str, str, dict[str, object]]] = {
    "grpo": ("grpo_agentic", GRPO, {}),
    "sft": (
        "sft_agentic",
        SFT,
        # The warm start has seen any task that it would hold out.
        {
            "save_every": 5,
            "held_out_frac": 0,
            "checkpoints__keep_last": 1,
            "checkpoints__exports": "kept",
        },
    ),
    "reinforce": (
        "grpo_agentic",
        GRPO,
        {"advantages__baseline": "none", "advantages__normalize_std": "false"},
    ),
}
SEEDS = (0, 1, 2)
SETS = {"held_out": "dialogue_held_out:5:32", "official": "official"}
VALIDATION = "dialogue_held_out:2:32"
"""Of these, and of ``dialogue_held_out:1:32``, settings were chosen; of ``SETS`` never."""
LOW, HIGH = 0.3, 0.6
CURVE = (
    *("reward/mean", "reward/strict_mean", "loss/total", "policy/entropy"),
    *("mismatch/kl", "group/zero_std_frac", "train/grad_norm", "train/lr", "rollout/turns"),
    *("rollout/sampled_tokens", "rollout/error_frac", "tool/error_frac", "time/step_s"),
)
"""What of metrics.jsonl a result holds, step by step, where there is such a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Where a study works, and the settings that all its results share."""

    runs: Path
    results: Path
    minutes: float
    trials: int
    model: str
    """What the warm start starts from: a name in the model cache, or a directory."""
    settings: tuple[str, ...]
    """More overrides, of every recipe: ``key=value``."""
    lock: IO[str] | None = None
    """Of the job at hand; its commands inherit it."""

    @property
    def warm(self) -> Path:
        """The run whose checkpoints are candidates for the warm start."""
        return self.runs / "warm"

    def result_file(self, arm: str, seed: int) -> Path:
        """Where the result of an arm and seed is written."""
        return self.results / f"{arm}_{seed}.json"

    def launch(self, command: list[str], name: str, **watch: Any) -> None:
        """Run a command; what it prints goes into ``runs/NAME.log``."""
        assert self.lock is not None
        print(f"{name}: {shown(command)}", flush=True)
        execute(command, log=self.runs / f"{name}.log", lock=self.lock, **watch)

    def same(self, warm_sha256: str) -> dict[str, Any]:
        """What all results of one study have in common."""
        return {
            "warm_start": warm_sha256,
            "minutes": self.minutes,
            "trials": self.trials,
            "tasks": SETS,
            **self.surroundings(),
        }

    def surroundings(self) -> dict[str, Any]:
        """What the length and the result of any run depend on beside its command."""
        configs = {path: _settings_digest(Path(path)) for path in (GRPO, SFT, EVAL)}
        return {"settings": list(self.settings), "configs": configs, "machine": machine()}

    @property
    def command(self) -> str:
        """What makes the study again."""
        command = [sys.executable, "tools/learning_study.py", "--minutes", f"{self.minutes:g}"]
        command += ["--trials", str(self.trials), "--model", self.model]
        return shown([*command, *(("--set", *self.settings) if self.settings else ())])

    def check_begun(self, name: str, facts: dict[str, Any]) -> None:
        """What ``runs/NAME`` holds is not taken for something else than it is.

        Raises:
            ValueError: it was begun with other facts, which are named.
        """
        path = self.runs / f"{name}.json"
        if path.exists():
            begun = json.loads(path.read_text(encoding="utf-8"))
            _check_equal(f"{self.runs / name}", begun, facts, remedy="delete it to begin anew")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(facts, indent=1) + "\n")

    def recipe(self, recipe: str, config: str, output_dir: Path, **settings: Any) -> list[str]:
        """A ``tune run`` that begins, or goes on where its output_dir holds a run."""
        if (output_dir / "run.json").exists():
            settings["resume"] = "true"
        return [*tune(recipe, config, output_dir=output_dir, **settings), *self.settings]


# ---- the warm start ------------------------------------------------------------------------------


def warm_start(study: Study) -> dict[str, Any]:
    """Make the warm start, or find the one that there is.

    Raises:
        ValueError: if no checkpoint fits the rule, or it is another than the results were made of.
    """
    with locked(study.runs / "warm.lock") as lock:
        return _warm_start(replace(study, lock=lock))


def _warm_start(study: Study) -> dict[str, Any]:
    path = study.results / "warm_start.json"
    known: dict[str, Any] | None = None
    if path.exists():
        known = dict(json.loads(path.read_text(encoding="utf-8")))
        now = study.surroundings()
        begun = {key: value for key, value in known.items() if key in now}
        remedy = f"give the same, or delete {study.results} and {study.runs}"
        _check_equal(str(path), begun, now, remedy=remedy)
    if known is None or not _weights(study, known["step"]).exists():
        launched = _train_warm(study)
        if known is None:
            known = {**_choose(study), "train": launched, **study.surroundings()}
            known["sha256"] = _digest(_weights(study, known["step"]))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(known, indent=2) + "\n")
    found = _digest(_weights(study, known["step"]))
    if found != known["sha256"]:
        raise ValueError(
            f"{_weights(study, known['step'])} is not the warm start of {path}: other threads, "
            f"packages or settings? Delete {study.results} to start a study of its own"
        )
    return known


def _check_equal(what: str, found: Any, wanted: Any, *, remedy: str) -> None:
    wanted = json.loads(json.dumps(wanted))  # tuples are lists there
    if found != wanted:
        other = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        told = "; ".join(f"{k} = {found.get(k)!r}, now {wanted.get(k)!r}" for k in other)
        raise ValueError(f"{what} was made with {told}; {remedy}")


def _weights(study: Study, step: int) -> Path:
    return study.warm / f"step_{step}" / "model.safetensors"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _settings_digest(path: Path) -> str:
    """Of what a config says: comments and layout may change."""
    import yaml

    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _code_digest() -> str:
    """Of all that training and evaluation run; the tools are not in it."""
    files = sorted([*Path("components").rglob("*.py"), *Path("recipes").glob("*.py")])
    parts = [f"{path} {_digest(path)}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _train_warm(study: Study) -> dict[str, Any]:
    demonstrations, model = study.runs / "demonstrations", f"model_dir={study.model}"
    if not demonstrations.exists():
        path = f"demonstrations.path={demonstrations}"
        command = [sys.executable, "tools/make_demonstrations.py", "--config", SFT, path, model]
        study.launch([*command, *study.settings], "demonstrations")
    command = study.recipe(
        "sft_agentic",
        SFT,
        study.warm,
        model_dir=study.model,
        demonstrations__path=demonstrations,
    )
    study.check_begun("warm", _typed(command) | study.surroundings())
    study.launch(command, "warm")
    return {**_typed(command), "step_s": [round(s, 2) for s in step_seconds(study.warm)]}


def _choose(study: Study) -> dict[str, Any]:
    """Measure the checkpoints in order until the rule has picked one."""
    steps = sorted(step for step, _ in numbered(study.warm))
    measured: list[tuple[int, float]] = []
    for step in steps:
        found = evaluate(
            study,
            study.warm / f"step_{step}",
            study.runs / f"validation/step_{step}",
            tasks=VALIDATION,
            seed=0,
            trials=(study.trials + 1) // 2,  # many checkpoints, and a wide range to hit
        )
        measured.append((step, found["official_mean"]))
        print(f"warm start, step {step}: {measured[-1][1]:.3f} on validation tasks", flush=True)
        if (picked := pick_warm_start(measured, low=LOW, high=HIGH)) is not None:
            return {"step": picked, "low": LOW, "high": HIGH, "measured": dict(measured)}
    raise none_fits(measured, low=LOW)


# ---- one arm and seed ----------------------------------------------------------------------------


def evaluate(
    study: Study, model: Path, output_dir: Path, *, tasks: str, seed: int, trials: int
) -> dict[str, Any]:
    """Evaluate a checkpoint with recipes/eval_agentic.py, or take what is there."""
    path, name = output_dir / "eval.json", str(output_dir.relative_to(study.runs))
    command = study.recipe(
        "eval_agentic",
        EVAL,
        output_dir,
        model_dir=model,
        seed=seed,
        num_trials=trials,
        env__tasks=tasks,
        dataset__tasks=tasks,
    )
    weights = {"weights": _digest(model / "model.safetensors")}
    study.check_begun(name, _typed(command) | weights | study.surroundings())
    if not path.exists():
        study.launch(command, name)
    found = json.loads(path.read_text(encoding="utf-8"))
    metrics = found["metrics"]
    return {
        "official_mean": metrics["eval/official_mean"],
        "interval": found["intervals"]["eval/official_mean"],
        "do_nothing_mean": metrics["eval/do_nothing_mean"],
        "error_frac": metrics["eval/error_frac"],
        "tasks": {row["task_id"]: row["official"] for row in found["tasks"]},
        **_typed(command),
    }


def train(study: Study, arm: str, seed: int, warm: Mapping[str, Any]) -> dict[str, Any]:
    """Train an arm for its time; the checkpoint is the run's last."""
    recipe, config, settings = ARMS[arm]
    output_dir, limit_s = study.runs / f"{arm}_{seed}", 60 * study.minutes
    if recipe == "sft_agentic":
        # The learning rate falls over the steps there is time for, by the lower quartile of the
        # warm start's: many may have run beside other work. The time limit holds in any case.
        step_s = sorted(warm["train"]["step_s"])
        steps = max(1, int(limit_s / step_s[len(step_s) // 4]))
        demonstrations = study.runs / "demonstrations"
        settings = {**settings, "num_steps": steps, "demonstrations__path": demonstrations}
    model = study.warm / f"step_{warm['step']}"
    command = study.recipe(recipe, config, output_dir, model_dir=model, seed=seed, **settings)
    study.check_begun(f"{arm}_{seed}", _typed(command) | study.same(warm["sha256"]))
    if not (is_over(step_seconds(output_dir), limit_s) and _last_model(output_dir).exists()):
        study.launch(command, f"{arm}_{seed}", run=output_dir, limit_s=limit_s)
    if not _last_model(output_dir).exists():
        raise ValueError(f"{output_dir} ended without a checkpoint of its last step")
    seconds = step_seconds(output_dir)
    if sum(seconds) < 0.9 * limit_s:
        print(f"{arm}_{seed}: {sum(seconds):.0f} of {limit_s:.0f} s of training were used")
    return {
        **_typed(command),
        "steps": len(seconds),
        "training_s": round(sum(seconds), 1),
    }


def _typed(command: list[str]) -> dict[str, str]:
    """The command that gives the result when nothing is there yet."""
    return {"command": shown([word for word in command if word != "resume=true"])}


def _last_model(run: Path) -> Path:
    """The checkpoint of a run's last finished step. It is not there if the run was killed."""
    return run / f"step_{len(step_seconds(run))}"


def one(study: Study, arm: str, seed: int) -> None:
    """Train and evaluate an arm and seed, and write its result."""
    warm = warm_start(study)
    result: dict[str, Any] = {"arm": arm, "seed": seed}
    model = study.warm / f"step_{warm['step']}"
    run = study.runs / f"{arm}_{seed}"
    if arm != BEFORE:
        result["train"] = train(study, arm, seed, warm)
        model = _last_model(run)
        result["curve"] = _curve(run)
    evals = study.runs / f"eval_{arm}_{seed}"
    result["evals"] = {
        name: evaluate(study, model, evals / name, tasks=tasks, seed=seed, trials=study.trials)
        for name, tasks in SETS.items()
    }
    versions = evals / "held_out/versions.json"
    result["versions"] = json.loads(versions.read_text(encoding="utf-8"))
    result["same"], result["code"] = study.same(warm["sha256"]), _code_digest()
    study.results.mkdir(parents=True, exist_ok=True)
    write_text(study.result_file(arm, seed), json.dumps(result, indent=2) + "\n")
    if arm != BEFORE:
        # Nothing resumes it: its weights stay, six times their size of optimizer state does not.
        (model / MANIFEST).unlink(missing_ok=True)
        remove_tree(model / "resume")


def _curve(run: Path) -> list[dict[str, float]]:
    from components.training.metrics import read_metrics

    rows = read_metrics(run / "metrics.jsonl")
    return [{k: row[k] for k in ("step", *CURVE) if k in row} for row in rows]


# ---- the whole -----------------------------------------------------------------------------------


def summarise(study: Study) -> None:
    """Write the summary of the results so far."""
    with locked(study.runs / "summary.lock"):
        _summarise(study)


def _summarise(study: Study) -> None:
    files = [study.result_file(arm, seed) for arm in (BEFORE, *ARMS) for seed in SEEDS]
    results = [json.loads(f.read_text(encoding="utf-8")) for f in files if f.exists()]
    if not results:
        return
    found = summary(results, arms=list(ARMS))
    whole = {
        **found["held_out"]["change"].get("grpo", {}),
        "sets": found,
        "do_nothing": {name: e["do_nothing_mean"] for name, e in results[0]["evals"].items()},
        "same": results[0]["same"],
        "code": {f"{r['arm']}_{r['seed']}": r["code"] for r in results},
        "train": {f"{r['arm']}_{r['seed']}": r["train"] for r in results if "train" in r},
        "command": study.command,
    }
    write_text(study.results.with_suffix(".json"), json.dumps(whole, indent=2) + "\n")
    for name, of_set in found.items():
        for what, entry in {**of_set["change"], **of_set["comparison"]}.items():
            print(
                f"{name:9} {what:15} {entry['reward_before']:.3f} -> {entry['reward_after']:.3f}  "
                f"{entry['delta']:+.3f} [{entry['ci_low']:+.3f}, {entry['ci_high']:+.3f}]  "
                f"seeds {entry['seeds']}"
            )


def check_results(study: Study) -> None:
    """The results that there are belong to this study: said before anything is computed.

    Raises:
        ValueError: one was made with other minutes, say.
    """
    for path in sorted(study.results.glob("*_[0-9]*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))["same"]
        remedy = f"give the same, or another --results and --runs than {study.results}"
        _check_equal(str(path), found, study.same(found["warm_start"]), remedy=remedy)


def _do(study: Study, arm: str, seed: int, *, wait: bool, failed: list[str]) -> bool:
    """Make a result unless it is there; False if another study is at it and we do not wait.

    What goes wrong with this one alone is told, and its name goes into ``failed``.
    """
    try:
        with locked(study.runs / f"{arm}_{seed}.lock", wait=wait) as lock:
            if not study.result_file(arm, seed).exists():
                try:
                    one(replace(study, lock=lock), arm, seed)
                except ValueError as error:
                    failed.append(f"{arm}_{seed}")
                    print(f"{arm}_{seed} failed: {error}", file=sys.stderr, flush=True)
                summarise(study)
    except BlockingIOError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = {f"{arm}_{seed}": (arm, seed) for seed in SEEDS for arm in (BEFORE, *ARMS)}
    parser.add_argument("--only", choices=["warm_start", *jobs], metavar="ARM_SEED", nargs="+")
    parser.add_argument("--list", action="store_true", help="what is done and what is missing")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, per arm and seed")
    parser.add_argument("--trials", type=int, default=4, help="rollouts per task in evaluations")
    parser.add_argument("--runs", type=Path, default=Path("runs/mock_learn"))
    parser.add_argument("--results", type=Path, default=Path("recipes/results/mock_learn"))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="before the warm start")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        dest="settings",
        metavar="key=value",
        help="more settings, of every recipe",
    )
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # a script's & makes a job ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        if args.list:
            for name, (arm, seed) in {"warm_start": ("warm", "start"), **jobs}.items():
                done = (args.results / f"{arm}_{seed}.json").exists()
                print(f"{name:12} {'done' if done else 'missing'}")
            return 0
        study = Study(
            runs=args.runs,
            results=args.results,
            minutes=args.minutes,
            trials=args.trials,
            model=args.model,
            settings=tuple(args.settings),
        )
        check_results(study)
        chosen = [jobs[name] for name in args.only or jobs if name in jobs]
        missing = any(not study.result_file(*job).exists() for job in chosen)
        if missing or "warm_start" in (args.only or ()):
            warm_start(study)  # without one nothing can be done, and nothing else is tried
        failed: list[str] = []
        others = [job for job in chosen if not _do(study, *job, wait=False, failed=failed)]
        for job in others:
            _do(study, *job, wait=True, failed=failed)
        summarise(study)
        if failed:
            print(f"learning_study: failed: {', '.join(failed)}; see above", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        print("learning_study: stopped; the same command goes on", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"learning_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
