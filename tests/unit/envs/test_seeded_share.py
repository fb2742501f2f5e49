from __future__ import annotations

import statistics
import string
import subprocess
import sys

import pytest

from components.envs.base import Trajectory
from components.envs.seeded_share import SeededShare
from components.envs.tau2 import Tau2Env


def play(texts: list[str], *, max_steps: int = 100, **settings: float) -> tuple[dict, Trajectory]:
    checker = SeededShare(**settings)  # type: ignore[arg-type]
    env = Tau2Env(domain="mock", tasks="generated:7:64", max_steps=max_steps, checker=checker)
    env.reset(seed=0, options={"task_id": "generated-7-0"})
    for text in texts:
        *_, info = env.step(text)
        if "reward" in info:
            return dict(info["reward"].breakdown), info["trajectory"]
    raise AssertionError("the episode has not ended")


def test_the_share_by_hand():
    checker = SeededShare(seed=3)
    inside = [c for c in string.ascii_letters if checker.share(c) == 1.0]
    outside = [c for c in string.ascii_letters if checker.share(c) == 0.0]
    assert len(inside) + len(outside) == 52
    assert 15 <= len(inside) <= 37  # about half
    assert checker.share(f" {inside[0]}\n{outside[0]} {inside[1]}{inside[0]}") == 0.75
    assert checker.share(" \n") == 0.0
    assert [c for c in string.ascii_letters if SeededShare(seed=4).share(c)] != inside
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))
    assert SeededShare(seed=1, size=0.2).share(letters) == pytest.approx(0.2, abs=0.02)


def test_it_is_the_same_in_every_process():
    code = "from components.envs.seeded_share import SeededShare as S; "
    code += "print(S(seed=5).share('abcdefgh'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == SeededShare(seed=5).share("abcdefgh")


def test_only_what_the_agent_said_counts():
    texts = ["Qwx zzv.", "Hm.", "aab", "What?", "No.", "No."]
    breakdown, trajectory = play(texts, seed=2)
    said = [m.content for m in trajectory.messages if m.role == "assistant"]
    greeting, *rest = said
    assert greeting not in texts
    assert rest == texts[: len(rest)]
    assert breakdown["seeded_share"] == SeededShare(seed=2).share("".join(rest))
    assert breakdown["official"] == 0.0
    assert "strict" in breakdown


def test_an_episode_that_the_benchmark_cuts_has_a_share_too():
    breakdown, trajectory = play(["abc", "def", "ghi"], max_steps=4)
    assert trajectory.termination_reason == "max_steps"
    assert 0.0 < breakdown["seeded_share"] < 1.0


def test_random_texts_have_variance():
    import random

    rng, checker = random.Random(0), SeededShare()
    texts = ["".join(rng.choices(string.ascii_lowercase, k=60)) for _ in range(16)]
    assert statistics.pstdev(map(checker.share, texts)) > 0.03


def test_settings_are_checked():
    for size in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match="size="):
            SeededShare(size=size)
