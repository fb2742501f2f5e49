"""The check of a backend at start-up: kernels with each known fault, planted, are refused."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

from components.attention import flex, folded, probe
from components.attention.flex import flex_attention_sink
from components.attention.folded import folded_attention
from components.attention.plan import MaskPlan
from components.attention.probe import check_attend, check_backend
from components.attention.reference import reference_attention
from components.attention.sink_attention import SinkAttention, prepare

CPU = torch.device("cpu")


def check(attend, *, gradients=True, dtype=torch.float32):
    check_attend(attend, name="tried", device=CPU, dtype=dtype, gradients=gradients)


@pytest.fixture
def differentiable(monkeypatch):
    """Let FlexAttention's eager path differentiate on a CPU, which torch forbids."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex, "check_trainable", lambda *args: None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_backends_pass(dtype):
    for attend in (folded_attention, reference_attention):
        check(attend, dtype=dtype)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_passes_with_and_without_gradients(differentiable):
    check(flex_attention_sink, gradients=False)
    check(flex_attention_sink)


def spoil_lse(monkeypatch, change):
    """FlexAttention with another LSE."""
    right = torch_flex.flex_attention

    def wrong(*args, **kwargs):
        out, aux = right(*args, **kwargs)
        return out, aux._replace(lse=change(aux.lse))

    monkeypatch.setattr(flex, "flex_attention", wrong)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_kernel_that_drops_the_gradient_of_its_lse_is_refused(differentiable, monkeypatch):
    """FlashAttention 2 and 3 do: out, dv and ds are right, dq and dk are not."""
    spoil_lse(monkeypatch, torch.Tensor.detach)
    check(flex_attention_sink, gradients=False)  # outputs do not show it
    with pytest.raises(
        RuntimeError, match=r"'tried' is wrong on cpu: dq of one key should be 0\.39"
    ):
        check(flex_attention_sink)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "change",
    [
        lambda lse: lse / torch.log(torch.tensor(2.0)),  # in log2
        lambda lse: lse + torch.log(torch.tensor(2.0)),
        lambda lse: torch.logaddexp(lse, torch.zeros(())),  # the sink is already in it
    ],
)
def test_an_lse_of_another_meaning_is_refused(monkeypatch, change):
    spoil_lse(monkeypatch, change)
    with pytest.raises(RuntimeError, match="output of equal scores"):
        check(flex_attention_sink, gradients=False)


def test_a_backward_without_the_sink_is_refused(monkeypatch):
    """Folding calls the kernel's backward with the LSE that contains the sink; this one has not."""
    right = folded.part_backward

    def wrong(grad, q, k, v, out, lse, part, **settings):
        return right(grad, q, k, v, out, lse - 0.1, part, **settings)

    monkeypatch.setattr(folded, "part_backward", wrong)
    with pytest.raises(RuntimeError, match="of one key should be"):
        check(folded_attention)


def layer() -> SinkAttention:
    return SinkAttention(
        layer=0,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        q_proj=nn.Linear(16, 16),
        k_proj=nn.Linear(16, 8),
        v_proj=nn.Linear(16, 8),
        output_proj=nn.Linear(16, 16),
        sinks=nn.Parameter(torch.zeros(2)),
        backend="folded",
    )


def test_modules_probe_their_backend_once(monkeypatch):
    monkeypatch.setattr(probe, "_checked", set())
    calls = []
    monkeypatch.setattr(probe, "check_attend", lambda *args, **kwargs: calls.append(kwargs["name"]))
    module, x = layer(), torch.randn(1, 5, 16)
    for _ in range(2):
        module(x)
    prepare(module, MaskPlan.causal(5), device=CPU)
    assert calls == ["folded"]


def test_a_refused_backend_stops_the_module(monkeypatch):
    monkeypatch.setattr(probe, "_checked", set())
    right = folded.part_backward
    monkeypatch.setattr(
        folded, "part_backward", lambda *a, **k: tuple(0 * x for x in right(*a, **k))
    )
    for _ in range(2):  # and goes on doing so
        with pytest.raises(RuntimeError, match="'folded' is wrong on cpu: dq"):
            layer()(torch.randn(1, 5, 16))


@pytest.mark.parametrize("mode", ["checkpointed", "inference", "no_grad"])
def test_the_first_forward_may_be_anywhere(monkeypatch, mode):
    """The probe differentiates inside whatever mode the caller is in, and leaves no trace there."""
    monkeypatch.setattr(probe, "_checked", set())
    module, x = layer(), torch.randn(1, 5, 16, requires_grad=True)
    if mode == "checkpointed":
        (got,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(module(x).sum(), x)[0])
    else:
        with torch.inference_mode() if mode == "inference" else torch.no_grad():
            module(x)
    assert probe._checked == {("folded", "cpu")}


def test_flex_on_a_cpu_is_probed_without_gradients(monkeypatch):
    monkeypatch.setattr(probe, "_checked", set())
    check_backend(flex_attention_sink, name="flex", device=CPU)
    assert probe._checked == {("flex", "cpu")}
