"""Names and seeds of rollouts."""

import subprocess
import sys

from components.rollout.specs import derive_seed, group_specs, trial_specs

TASKS = [("retail", "5"), ("retail", "9"), ("mock", "5")]


def specs(**settings):
    values = {"group_size": 3, "seed": 42, "phase": "train/7"}
    return group_specs(TASKS, **(values | settings))


def test_seeds_are_63_bits_of_sha256_and_the_same_in_every_process():
    # first 8 bytes of sha256(b"abc") are ba7816bf8f01cfea (FIPS 180-2, B.1), halved
    assert derive_seed("abc") == 0xBA7816BF8F01CFEA >> 1
    code = "from components.rollout.specs import derive_seed; print(derive_seed(1, 'x', 'y'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == derive_seed(1, "x", "y") < 2**63


def test_groups_and_members_in_order_with_names_of_their_own():
    found = specs()
    assert [(s.group, s.member, s.domain, s.task_id) for s in found] == [
        (group, member, *TASKS[group]) for group in range(3) for member in range(3)
    ]
    assert found[4].rollout_id == "train/7/1/retail/9/1"
    assert len({s.rollout_id for s in found}) == 9


def test_siblings_share_the_environments_seed_but_not_the_samplings():
    found = specs()
    for group in range(3):
        mine = [s for s in found if s.group == group]
        assert len({s.env_seed for s in mine}) == 1
        assert len({s.seed for s in mine}) == 3
    assert len({s.env_seed for s in found}) == 3
    assert len({s.seed for s in found}) == 9


def test_a_task_that_is_drawn_twice_in_a_step_gives_two_groups():
    found = group_specs([("mock", "5")] * 2, group_size=2, seed=1, phase="train/1")
    assert len({s.rollout_id for s in found}) == len({s.seed for s in found}) == 4
    assert found[0].env_seed != found[2].env_seed


def test_every_draw_depends_on_seed_and_phase():
    seen = [specs(), specs(seed=43), specs(phase="train/8"), specs(phase="eval/7")]
    assert len({s.seed for each in seen for s in each}) == 36
    assert len({s.env_seed for each in seen for s in each}) == 12
    assert specs() == seen[0]


def test_a_ranks_share_has_the_names_and_seeds_of_the_whole():
    whole = specs()
    part = group_specs(TASKS[1:], group_size=3, seed=42, phase="train/7", first_group=1)
    assert part == whole[3:]


def trials(tasks=TASKS, **settings):
    values = {"group_size": 4, "seed": 42, "phase": "eval/8"}
    return trial_specs(tasks, **(values | settings))


def starts(found):
    return {(s.domain, s.task_id, s.member): s.env_seed for s in found}


def test_every_trial_has_a_start_of_its_own():
    """As in tau2-bench; what training does is the test of siblings above."""
    found = trials()
    assert len(found) == len({s.env_seed for s in found}) == len({s.seed for s in found}) == 12
    assert [s.rollout_id for s in found] == [
        s.rollout_id for s in specs(phase="eval/8", group_size=4)
    ]


def test_a_trial_starts_alike_for_every_checkpoint():
    """Whatever the step of the evaluation, the tasks beside it and the ranks, not the seed."""
    found = trials()
    assert starts(trials(phase="eval/16")) == starts(found)
    assert starts(trials(TASKS[::-1])) == starts(found)
    assert trials(TASKS[1:], first_group=1) == found[4:]
    more = starts(trials(group_size=8))
    assert {key: more[key] for key in starts(found)} == starts(found)
    assert not set(starts(trials(seed=43)).values()) & set(starts(found).values())
    assert {s.seed for s in trials(phase="eval/16")}.isdisjoint(s.seed for s in found)
