"""gpt-oss on CUDA: grouped products and flex attention in bf16 against fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from components.attention.plan import MaskPlan
from components.attention.sink_attention import prepare
from components.models.gpt_oss import gpt_oss
from components.models.gpt_oss.grouped import group, grouped_product, method_for
from tests.unit.models.gpt_oss import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IDS = torch.randint(0, tiny.VOCAB, (1, 200), generator=torch.Generator().manual_seed(0))


def run(model, device):
    plan = MaskPlan.causal(IDS.shape[1])
    if device == "cuda":
        prepare(model, plan, device=torch.device(device))
    positions = torch.arange(IDS.shape[1], device=device)[None]
    return model(IDS.to(device), mask=plan, input_pos=positions)


@pytest.mark.parametrize("method", ["grouped", "loop"])
def test_products_and_their_gradients(method):
    torch.manual_seed(0)
    choice = torch.rand(500, 32).topk(4).indices
    choice[choice == 7] = 8  # an expert without rows
    rows = torch.randn(2000, 256).bfloat16().cuda().requires_grad_()
    weight = torch.randn(32, 256, 384).bfloat16().cuda().requires_grad_()
    groups = group(choice.cuda(), num_experts=32)
    assert method_for(rows, weight) == "grouped"
    grad = torch.randn(2000, 384).bfloat16().cuda()
    out = grouped_product(rows, weight, groups, method=method)
    got = (out, *torch.autograd.grad(out, (rows, weight), grad))

    exact_rows, exact_weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    parts = exact_rows.split(groups.counts.tolist())
    exact = torch.cat([part @ exact_weight[e] for e, part in enumerate(parts)])
    expected = (exact, *torch.autograd.grad(exact, (exact_rows, exact_weight), grad.double()))
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 2**-7 * b.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["flex", "folded"])
def test_a_model_is_close_to_fp64_and_equal_to_itself(tmp_path, backend, compiled):
    directory = tiny.write(tmp_path / "tiny", state=tiny.tensors(dtype=torch.bfloat16))
    with torch.no_grad():
        exact = run(gpt_oss(directory, dtype=torch.float64, backend="reference"), "cpu")
    model = gpt_oss(
        directory, dtype=torch.bfloat16, backend=backend, checkpoint_activations=True
    ).cuda()
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True)
    first, second = run(model, "cuda"), run(model, "cuda")
    assert torch.equal(first, second)  # the ratio of the first update is 1
    got, wanted = first.double().cpu().log_softmax(-1), exact.double().log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    assert kl.median() < 1e-2
    first.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    metrics = model.step_metrics()
    assert 1 / tiny.EXPERTS <= metrics["moe/load_max_frac"] <= 0.5
