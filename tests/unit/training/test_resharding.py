"""Checkpoints of one rank resume on two gloo ranks and back: weights, moments, what follows."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.attention.plan import MaskPlan
from components.models.smollm2 import lora_smollm2, smollm2
from components.training import checkpoint
from components.training.checkpoint import Checkpoints
from components.training.parallelize import World, full_tensor, shard
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from tests.unit.models import tiny

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
STEPS = 3


class Run:
    """A model that is trained on the same tokens on every rank."""

    def __init__(self, directory, world, *, lora):
        make = lora_smollm2 if lora else smollm2
        # Of rank 3: two ranks hold two rows and one.
        settings = {"lora_rank": 3, "lora_alpha": 3, "lora_modules": ["q_proj", "w2"]}
        torch.manual_seed(0)
        self.model = make(directory, dtype=torch.float32, **(settings if lora else {}))
        if world.size > 1:
            shard(self.model, world, dtype=torch.float32)
        self.masters = MasterWeights(self.model)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.01)
        self.reference = ReferencePolicy(self.model)

    @property
    def parts(self):
        return self.masters, self.optimizer, self.reference

    def train(self, steps):
        for _ in range(steps):
            logits = self.model(TOKENS, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])
            logits.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self):
        return {n: full_tensor(p.detach()).clone() for n, p in self.masters.named_parameters()}


def write_model(path):
    path.mkdir()
    (path / "config.json").write_text("{}")


def train_and_save(directory, output_dir, world, *, lora, in_background):
    run = Run(directory, world, lora=lora)
    checkpoints = Checkpoints(output_dir, world, in_background=in_background)
    run.train(STEPS)
    facts = {"step": STEPS, "seed": 1}
    checkpoints.save(*run.parts, facts, take_model=lambda changing: write_model)
    run.train(STEPS)  # also while it is written
    checkpoints.wait()
    checkpoints.poll()
    if world.is_main:
        torch.save(run.whole() if world.size == 1 else None, output_dir / "after.pt")
    return run.whole()


def resume(directory, output_dir, world, *, lora):
    run = Run(directory, world, lora=lora)
    run.train(1)  # of another state than the checkpoint's, moments included
    with torch.no_grad():
        for tensor in run.reference.tensors().values():
            tensor.zero_()
    path = checkpoint.last_whole(output_dir)
    checkpoints = Checkpoints(output_dir, world)
    assert checkpoints.restore(path, *run.parts, seed=1) == {"step": STEPS, "seed": 1}
    reference = Run(directory, World.alone(), lora=lora).whole()
    for name, tensor in run.reference.tensors().items():
        assert torch.equal(full_tensor(tensor), reference[name])
    restored = run.whole()
    run.train(STEPS)
    return restored, run.whole()


def ranks(rank: int, store: str, function, *arguments) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    function(World(rank=rank, size=2, device=torch.device("cpu")), *arguments)
    dist.destroy_process_group()


def save_on_two(world, directory, output_dir, lora, in_background):
    after = train_and_save(directory, output_dir, world, lora=lora, in_background=in_background)
    if world.is_main:
        torch.save(after, output_dir / "after.pt")


def resume_on_two(world, directory, output_dir, lora):
    restored, after = resume(directory, output_dir, world, lora=lora)
    if world.is_main:
        torch.save((restored, after), output_dir / "resumed.pt")


def on_two(tmp_path, name, function, *arguments):
    mp.spawn(ranks, args=(str(tmp_path / f"store_{name}"), function, *arguments), nprocs=2)


def load(path: Path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("saved_on", "resumed_on", "lora", "in_background"),
    [(1, 2, True, False), (2, 1, False, True), (2, 2, True, True)],
)
def test_another_number_of_ranks_goes_on(tmp_path, saved_on, resumed_on, lora, in_background):
    directory, output_dir = tiny.write(tmp_path / "model"), tmp_path / "run"
    output_dir.mkdir()
    if saved_on == 1:
        how = {"lora": lora, "in_background": in_background}
        train_and_save(directory, output_dir, World.alone(), **how)
    else:
        on_two(tmp_path, "save", save_on_two, directory, output_dir, lora, in_background)
    saved = checkpoint.load(output_dir / f"step_{STEPS}")
    assert len(saved.state["rng"]) == saved_on
    files = sorted((output_dir / f"step_{STEPS}/resume").glob("*.safetensors"))
    assert len(files) == saved_on  # nothing was gathered
    if resumed_on == 1:
        restored, after = resume(directory, output_dir, World.alone(), lora=lora)
    else:
        on_two(tmp_path, "resume", resume_on_two, directory, output_dir, lora)
        restored, after = load(output_dir / "resumed.pt")
    assert restored.keys() == saved.weights.keys()
    assert all(torch.equal(restored[name], saved.weights[name]) for name in restored)  # each bit
    expected = load(output_dir / "after.pt")
    for name, tensor in expected.items():
        assert torch.allclose(after[name], tensor, atol=1e-6), name
        assert not torch.allclose(after[name], restored[name], atol=1e-3), name


def full_disk_on_the_second(world, output_dir):
    run = Run(output_dir.parent / "model", world, lora=False)
    checkpoints = Checkpoints(output_dir, world)
    facts = {"step": 0, "seed": 1}
    checkpoints.save(*run.parts, facts, take_model=lambda changing: write_model)
    if world.rank == 1:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    run.train(1)
    with pytest.raises(OSError, match=r"File too large \(while writing step_1; .*is step_0\)"):
        checkpoints.save(
            *run.parts, {"step": 1, "seed": 1}, take_model=lambda changing: write_model
        )
    assert sorted(p.name for p in output_dir.iterdir()) == ["step_0"] or world.rank == 1
    # the ranks are still in step with one another
    assert world.sum([1.0]) == [2.0]


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path):
    tiny.write(tmp_path / "model")
    (tmp_path / "run").mkdir()
    on_two(tmp_path, "full", full_disk_on_the_second, tmp_path / "run")
