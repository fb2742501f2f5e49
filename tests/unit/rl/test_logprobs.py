import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from components.rl.logprobs import chunked_logprobs


def _dense(hidden, weight, targets, temperature):
    """The specification: everything at once, by autograd."""
    table = torch.log_softmax((hidden @ weight.T) / temperature, dim=-1)
    entropy = -(table.exp() * table).sum(-1)
    return table.gather(1, targets[:, None]).squeeze(1), entropy


def _draw(num_tokens, width=8, vocab=37, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    factor = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, factor.to(dtype)


@pytest.mark.parametrize("train_weight", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 3, 10, 64])
def test_equals_dense(chunk_size, temperature, train_weight):
    hidden, weight, targets, factor = _draw(10)
    hidden.requires_grad_(True)
    weight.requires_grad_(train_weight)
    leaves = [hidden, weight] if train_weight else [hidden]
    expected, expected_entropy = _dense(hidden, weight, targets, temperature)
    expected_grads = torch.autograd.grad((expected * factor).sum(), leaves)

    logprobs, entropy = chunked_logprobs(
        hidden, weight, targets=targets, temperature=temperature, chunk_size=chunk_size
    )
    grads = torch.autograd.grad((logprobs * factor).sum(), leaves)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy, expected_entropy.detach(), rtol=0, atol=1e-13)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-13)


def test_finite_differences():
    hidden, weight, targets, _ = _draw(5, width=3, vocab=7)

    def logprobs(h, w):
        return chunked_logprobs(h, w, targets=targets, temperature=0.5, chunk_size=2)[0]

    assert torch.autograd.gradcheck(
        logprobs, (hidden.requires_grad_(True), weight.requires_grad_(True))
    )


def test_only_the_weight_is_trained():
    hidden, weight, targets, factor = _draw(10)
    weight.requires_grad_(True)
    (expected,) = torch.autograd.grad(
        (_dense(hidden, weight, targets, 1.0)[0] * factor).sum(), weight
    )
    logprobs, _ = chunked_logprobs(hidden, weight, targets=targets, temperature=1.0, chunk_size=4)
    (grad,) = torch.autograd.grad((logprobs * factor).sum(), weight)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-13)


def test_fp32_against_fp64():
    hidden, weight, targets, factor = _draw(50, width=64, vocab=1000, dtype=torch.float32)
    expected, expected_entropy = _dense(hidden.double(), weight.double(), targets, 1.0)
    leaf = hidden.clone().requires_grad_(True)
    logprobs, entropy = chunked_logprobs(
        leaf, weight, targets=targets, temperature=1.0, chunk_size=16
    )
    # Logits are of size 8 * sqrt(log V): one fp32 rounding of those is about 2e-6.
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=2e-5)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (grad,) = torch.autograd.grad((logprobs * factor).sum(), leaf)
    wide = hidden.double().requires_grad_(True)
    (expected_grad,) = torch.autograd.grad(
        (_dense(wide, weight.double(), targets, 1.0)[0] * factor).sum(), wide
    )
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=2e-5)


def test_bf16_is_as_good_as_its_logits():
    hidden, weight, targets, factor = _draw(40, width=32, vocab=500, dtype=torch.bfloat16)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    logprobs, entropy = chunked_logprobs(
        hidden, weight, targets=targets, temperature=1.0, chunk_size=16
    )
    assert logprobs.dtype == entropy.dtype == torch.float32
    # The products are rounded to bf16, everything behind them is fp32: the same as fp64 on the
    # rounded logits. A log-softmax in bf16 would be off by 0.03.
    logits = (hidden @ weight.T).detach().double()
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)

    grads = torch.autograd.grad((logprobs * factor.float()).sum(), [hidden, weight])
    wide = [hidden.detach().double(), weight.detach().double()]
    for leaf in wide:
        leaf.requires_grad_(True)
    expected_grads = torch.autograd.grad(
        (_dense(*wide, targets, 1.0)[0] * factor.double()).sum(), wide
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        error = (grad.double() - expected_grad).norm() / expected_grad.norm()
        assert error < 0.02  # bf16 rounds by up to 0.4 %; logits of size 10 add a few times that


def test_temperature_by_hand():
    # Fault 16: logits [2, 0], T = .5 are [4, 0]: log sigmoid(4). Without it -0.1269.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    logprobs, entropy = chunked_logprobs(hidden, weight, targets=torch.tensor([0]), temperature=0.5)
    assert float(logprobs) == pytest.approx(-0.0181499, abs=1e-6)
    p = 1 / (1 + math.exp(-4))
    assert float(entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_large_logits():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1000.0], [0.0], [-1000.0]])
    logprobs, entropy = chunked_logprobs(hidden, weight, targets=torch.tensor([1]), temperature=1.0)
    logprobs.sum().backward()
    assert float(logprobs.detach()) == -1000.0
    assert float(entropy) == 0.0
    assert float(hidden.grad) == -1000.0


@pytest.mark.parametrize("compute_entropy", [True, False])
def test_without_tokens(compute_entropy):
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    logprobs, entropy = chunked_logprobs(
        hidden,
        weight,
        targets=torch.empty(0, dtype=torch.long),
        temperature=1.0,
        compute_entropy=compute_entropy,
    )
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(37, 8))
    assert entropy.shape == (0,) if compute_entropy else entropy is None


def test_entropy_has_no_gradient():
    hidden, weight, targets, _ = _draw(3)
    _, entropy = chunked_logprobs(
        hidden.requires_grad_(True), weight, targets=targets, temperature=1.0
    )
    assert not entropy.requires_grad


def test_is_a_head():
    """The way a model calls it: head(hidden, weight)."""
    hidden, weight, targets, _ = _draw(5)
    head = partial(chunked_logprobs, targets=targets, temperature=1.0, compute_entropy=False)
    logprobs, entropy = head(hidden, weight)
    assert entropy is None
    torch.testing.assert_close(logprobs, _dense(hidden, weight, targets, 1.0)[0])


def _peak_bytes(call):
    """Largest sum of live CPU allocations made inside the call, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    live = peak = 0
    num_events = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            num_events += 1
            live += event.nbytes()
            peak = max(peak, live)
    assert num_events > 0
    return peak


@pytest.mark.parametrize(
    ("compute_entropy", "entropy_grad"), [(True, False), (False, False), (True, True)]
)
@pytest.mark.parametrize("train_weight", [True, False])
def test_peak_bytes(train_weight, compute_entropy, entropy_grad):
    """Fault 17: no step holds more than a chunk of logits (two with the entropy)."""
    num_tokens, width, vocab, chunk_size = 512, 16, 8192, 32
    hidden, weight, targets, _ = _draw(num_tokens, width, vocab, dtype=torch.float32)
    hidden.requires_grad_(True)
    weight.requires_grad_(train_weight)

    def step():
        logprobs, entropy = chunked_logprobs(
            hidden,
            weight,
            targets=targets,
            temperature=0.9,
            chunk_size=chunk_size,
            compute_entropy=compute_entropy,
            entropy_grad=entropy_grad,
        )
        (logprobs + entropy if entropy_grad else logprobs).sum().backward()

    def dense_step():
        _dense(hidden, weight, targets, 0.9)[0].sum().backward()

    chunk = chunk_size * vocab * 4
    weight_grad = vocab * width * 4 if train_weight else 0
    per_token = num_tokens * (4 * width * (1 + entropy_grad) + 8) * 4
    peak = _peak_bytes(step)
    limit = (1 + compute_entropy) * chunk + weight_grad + per_token
    assert chunk < peak <= limit
    hidden.grad = weight.grad = None
    assert _peak_bytes(dense_step) > num_tokens * vocab * 4  # the measurement sees what is large


def test_no_gradient_work_without_gradient():
    """Under no_grad only the logits are computed: one product per chunk."""
    hidden, weight, targets, _ = _draw(8)
    hidden.requires_grad_(True)

    def count_products():
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            chunked_logprobs(hidden, weight, targets=targets, temperature=1.0, chunk_size=4)
        return sum(event.count for event in prof.key_averages() if event.key == "aten::mm")

    assert count_products() == 4
    with torch.no_grad():
        assert count_products() == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature = 0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "targets"),
        ({"weight": torch.zeros(5, 9)}, "weight"),
        ({"weight": torch.zeros(5, 8, dtype=torch.bfloat16)}, "bfloat16"),
    ],
)
def test_settings_are_checked(settings, message):
    call = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(5, 8),
        "targets": torch.zeros(4, dtype=torch.long),
        "temperature": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**{**call, **settings})


@pytest.mark.parametrize("train_weight", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_the_entropy_has_its_gradient_where_it_is_asked_for(chunk_size, train_weight):
    """Against autograd through the dense table; log-probability and entropy both take part."""
    hidden, weight, targets, factor = _draw(10)
    hidden.requires_grad_(True)
    weight.requires_grad_(train_weight)
    leaves = [hidden, weight] if train_weight else [hidden]
    dense, dense_entropy = _dense(hidden, weight, targets, 0.7)
    expected = torch.autograd.grad((dense * factor + dense_entropy * factor.flip(0)).sum(), leaves)
    logprobs, entropy = chunked_logprobs(
        hidden, weight, targets=targets, temperature=0.7, chunk_size=chunk_size, entropy_grad=True
    )
    torch.testing.assert_close(entropy, dense_entropy, rtol=0, atol=1e-13)
    grads = torch.autograd.grad((logprobs * factor + entropy * factor.flip(0)).sum(), leaves)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-13)


def test_an_entropy_that_is_not_computed_has_no_gradient():
    hidden, weight, targets, _ = _draw(2)
    with pytest.raises(ValueError, match="entropy_grad"):
        chunked_logprobs(
            hidden,
            weight,
            targets=targets,
            temperature=1.0,
            compute_entropy=False,
            entropy_grad=True,
        )
