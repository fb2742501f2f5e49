import math

import pytest
import torch

from components.attention.rope import RotaryEmbedding
from components.models.gpt_oss.rope import Yarn, YarnRotaryEmbedding

GPT_OSS = {"base": 150_000.0}


def frequencies(yarn):
    return yarn.frequencies(64, device=torch.device("cpu"), **GPT_OSS)


def test_the_ramp_of_gpt_oss_is_not_rounded():
    low, high = Yarn().ramp(64, **GPT_OSS)
    assert low == pytest.approx(8.0928, abs=5e-5)
    assert high == pytest.approx(17.3980, abs=5e-5)
    assert Yarn(truncate=True).ramp(64, **GPT_OSS) == (8, 18)


def test_frequencies_of_gpt_oss():
    f = frequencies(Yarn())
    assert float(f[17]) == pytest.approx(1.2932e-4, rel=1e-4)
    assert float(frequencies(Yarn(truncate=True))[17]) == pytest.approx(2.2795e-4, rel=1e-4)
    plain = [150_000.0 ** (-2 * i / 64) for i in range(32)]
    # pairs that turn often keep their frequency, slow ones are stretched 32 times
    assert f[:9].tolist() == pytest.approx(plain[:9], rel=1e-5)
    assert f[18:].tolist() == pytest.approx([x / 32 for x in plain[18:]], rel=1e-5)


def test_the_magnitude_is_on_cos_and_sin_once():
    yarn = Yarn()
    assert yarn.magnitude == pytest.approx(1.3465736, abs=1e-7)
    rope = YarnRotaryEmbedding(64, max_positions=16, yarn=yarn, **GPT_OSS)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64).unbind()
    turned = [rope(x, input_pos=torch.tensor([[5]])) for x in (q, k)]
    # at equal positions a rotation leaves the score as it is: it grows by the square alone
    assert float((turned[0] * turned[1]).sum() / (q * k).sum()) == pytest.approx(1.8132604, 1e-5)


def test_rotation_in_fp64_written_out():
    yarn = Yarn(factor=4.0, beta_fast=8.0, beta_slow=1.0, original_positions=128)
    rope = YarnRotaryEmbedding(16, max_positions=300, base=1000.0, yarn=yarn)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 16, requires_grad=True)
    positions = [0, 7, 299]
    out = rope(x, input_pos=torch.tensor([positions]))
    grad = torch.randn_like(out)
    out.backward(grad)

    def edge(turns):
        return 16 * math.log(128 / (turns * 2 * math.pi)) / (2 * math.log(1000.0))

    low, high = edge(8.0), edge(1.0)
    m = 0.1 * math.log(4.0) + 1
    for t, position in enumerate(positions):
        for pair in range(8):
            f = 1000.0 ** (-2 * pair / 16)
            mix = min(max((pair - low) / (high - low), 0.0), 1.0)
            angle = position * (f / 4.0 * mix + f * (1 - mix))
            cos, sin = m * math.cos(angle), m * math.sin(angle)
            turn = torch.tensor([[cos, -sin], [sin, cos]])
            pairs = slice(2 * pair, 2 * pair + 2)
            assert torch.allclose(out[0, t, :, pairs], x[0, t, :, pairs] @ turn.T, atol=3e-5)
            assert torch.allclose(x.grad[0, t, :, pairs], grad[0, t, :, pairs] @ turn, atol=3e-5)


def test_a_factor_of_one_is_the_plain_rotation():
    plain = RotaryEmbedding(16, max_positions=40, base=1000.0)
    yarn = YarnRotaryEmbedding(16, max_positions=40, base=1000.0, yarn=Yarn(factor=1.0))
    assert torch.allclose(plain.cache, yarn.cache, atol=1e-5)


def test_the_table_survives_a_cast_and_leaves_the_meta_device():
    with torch.device("meta"):
        rope = YarnRotaryEmbedding(16, max_positions=40, base=1000.0, yarn=Yarn())
    whole = YarnRotaryEmbedding(16, max_positions=40, base=1000.0, yarn=Yarn())
    assert torch.equal(rope.to_empty(device="cpu").to(torch.bfloat16).cache, whole.cache)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 0.5}, "factor must be at least 1, not 0.5"),
        ({"beta_fast": 1.0}, r"beta_fast \(1.0\) must be above beta_slow"),
    ],
)
def test_settings_without_sense_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        Yarn(**settings)
