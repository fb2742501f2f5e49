"""The picture of a run: reward, loss and KL, entropy, lengths, failures, time per phase."""

from __future__ import annotations

from pathlib import Path

from components.training.metrics import read_metrics

_REWARDS = (
    ("reward/mean", "training reward"),
    ("reward/official_mean", "official"),
    ("reward/strict_mean", "strict"),
    ("eval/official_mean", "official, held out"),
)
_SHARES = (
    ("rollout/truncated_frac", "rollouts cut short"),
    ("rollout/error_frac", "rollouts that failed"),
    ("tool/error_frac", "tool calls that failed"),
)
_LENGTHS = (
    ("rollout/tokens", "tokens per rollout"),
    ("rollout/sampled_tokens", "of them sampled"),
)


def plot_run(output_dir: Path) -> Path | None:
    """Draw ``run.png`` from ``metrics.jsonl``.

    Args:
        output_dir: of the run.

    Returns:
        The picture, or None when no step has finished.
    """
    rows = read_metrics(output_dir / "metrics.jsonl")
    steps = [row for row in rows if "time/step_s" in row]
    if not steps:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), layout="constrained")
    reward, loss, entropy, length, shares, seconds = axes.flat
    for name, label in _REWARDS:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            reward.plot(*zip(*points, strict=True), marker="o", label=label)
    reward.set(title="Reward (mean over rollouts)", xlabel="step", ylim=(-0.02, 1.02))
    _legend(reward)
    _lines(loss, steps, (("loss/policy", "policy loss"),))
    twin = loss.twinx()
    _lines(
        twin,
        steps,
        (("loss/kl", "KL to reference"), ("mismatch/kl", "KL generator to trainer")),
        style="--",
        first_color=1,
    )
    loss.set(title="Loss (left) and KL in nats per token (right)", xlabel="step")
    handles = [*loss.get_lines(), *twin.get_lines()]
    loss.legend(handles, [str(line.get_label()) for line in handles])
    _lines(entropy, steps, (("policy/entropy", "mean entropy"),))
    entropy.set(title="Entropy of the policy (nats per token)", xlabel="step")
    _lines(length, steps, _LENGTHS)
    length.set(title="Length (tokens, mean over rollouts)", xlabel="step")
    for axis in (entropy, length):  # 0 in sight, and what is nearly constant not at the edge
        if axis.get_lines():
            axis.axhline(0.0, color="none")
    _legend(length)
    _lines(shares, steps, _SHARES)
    shares.set(title="Cut short or failed (share)", xlabel="step", ylim=(-0.02, 1.02))
    _legend(shares)
    timed = dict.fromkeys(name for row in steps for name in row if name.startswith("time/"))
    phases = [name for name in timed if name != "time/step_s"]
    bottom = [0.0] * len(steps)
    for phase in phases:
        heights = [row.get(phase, 0.0) for row in steps]
        label = phase.removeprefix("time/").removesuffix("_s")
        seconds.bar([row["step"] for row in steps], heights, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    seconds.set(title="Wall time per step (s)", xlabel="step")
    seconds.legend()
    for axis in axes.flat:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    path = output_dir / "run.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _legend(axis) -> None:
    if axis.get_lines():  # matplotlib warns of an empty one, e.g. where every rollout failed
        axis.legend()


def _lines(axis, rows, names, *, style: str = "-", first_color: int = 0) -> None:
    for number, (name, label) in enumerate(names):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            color = f"C{first_color + number}"
            axis.plot(*zip(*points, strict=True), style, marker="o", label=label, color=color)
