"""Models with our attention against the untouched models that torchtune builds.

Where sinks or windows are added, the reference is torchtune's own module, given the mask and the
sink column by a dense attention written here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import lora_phi3, phi3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from components.models.attach import with_sink_attention

VOCAB, LAYERS, HEADS, KV_HEADS, WIDTH, T = 53, 2, 4, 2, 32, 24
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "embed_dim": WIDTH,
    "intermediate_dim": 40,
    "max_seq_len": 64,
}
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 3,
    "lora_alpha": 6.0,
}


def with_norms() -> TransformerDecoder:
    """torchtune's modules with q and k norms; none of its models in this release has them."""
    rope = RotaryPositionalEmbeddings(8, 64)

    def linear(out: int) -> nn.Linear:
        return nn.Linear(WIDTH, out, bias=False)

    def layer() -> nn.Module:
        attention = MultiHeadAttention(
            embed_dim=WIDTH,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=8,
            q_proj=linear(32),
            k_proj=linear(16),
            v_proj=linear(16),
            output_proj=linear(32),
            pos_embeddings=rope,
            q_norm=RMSNorm(8),
            k_norm=RMSNorm(8),
        )
        mlp = FeedForward(gate_proj=linear(32), down_proj=linear(32), up_proj=linear(32))
        return TransformerSelfAttentionLayer(
            attention, mlp, sa_norm=RMSNorm(WIDTH), mlp_norm=RMSNorm(WIDTH)
        )

    return TransformerDecoder(
        tok_embeddings=nn.Embedding(VOCAB, WIDTH),
        layers=[layer() for _ in range(LAYERS)],
        max_seq_len=64,
        num_heads=HEADS,
        head_dim=8,
        norm=RMSNorm(WIDTH),
        output=linear(VOCAB),
    )


BUILDERS: dict[str, Callable[[], TransformerDecoder]] = {
    "llama2": lambda: llama2(**SIZES),
    "llama3": lambda: llama3(**SIZES),
    "llama3_1": lambda: llama3_1(**SIZES),
    "llama3_2": lambda: llama3_2(**SIZES),
    "mistral": lambda: mistral(**SIZES),
    "qwen2": lambda: qwen2(**SIZES, tie_word_embeddings=True),
    "qwen2_5": lambda: qwen2(**SIZES, norm_eps=1e-6),
    "phi3": lambda: phi3(**SIZES),
    "norms": with_norms,
    "lora_llama2": lambda: lora_llama2(**LORA, **SIZES),
    "lora_qwen2": lambda: lora_qwen2(**LORA, **SIZES),
    "lora_phi3": lambda: lora_phi3(**LORA, **SIZES),
}


def random_model(name: str) -> TransformerDecoder:
    """Weights sharp enough for a wrong mask or rotation to show, norms and biases included."""
    torch.manual_seed(0)
    builders = BUILDERS | {"gemma2": lambda: gemma2(**SIZES, head_dim=8, **GEMMA)}
    model = builders[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.3 * parameter.shape[-1] ** -0.5)
    return model


GEMMA = {"hidden_capping_value": 1.5, "sliding_window_size": 5, "query_pre_attn_scalar": 12}
TOKENS = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module, **inputs) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(TOKENS, **inputs)
    torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()
    ).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None for g in grads.values())
    return {"logits": logits.detach(), **grads}


def same(got: dict[str, Tensor], expected: dict[str, Tensor], *, limit: float = 1e-5) -> None:
    """Equal to a share of each tensor's largest entry: fp32 sums in another order."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max()
        assert scale > 0, name
        assert (got[name] - value).abs().max() <= limit * scale, name


@pytest.mark.parametrize("positions", [None, torch.arange(T)[None] + 7])
@pytest.mark.parametrize("name", BUILDERS)
def test_logits_and_gradients_are_the_models_own(name, positions):
    theirs = random_model(name)
    ours = with_sink_attention(copy.deepcopy(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    same(outcome(ours, input_pos=positions), outcome(theirs, input_pos=positions))


class Dense(nn.Module):
    """In the place of torchtune's call of a kernel: any mask, and a sink column."""

    def __init__(self, window: int | None, prefix: int, sinks: Tensor | None) -> None:
        super().__init__()
        self.window, self.prefix = window, prefix
        self.sinks = None if sinks is None else nn.Parameter(sinks.clone())

    def forward(self, q, k, v, *, mask, dropout_p, is_causal):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        visible = j <= i
        if self.window is not None:
            visible &= (i - j <= self.window) | (j < self.prefix)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            column = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("backend", ["folded", "reference"])
@pytest.mark.parametrize("name", ["llama3_1", "mistral", "qwen2", "phi3", "norms", "lora_qwen2"])
def test_sinks_windows_and_prefix_are_a_column_and_a_mask(name, backend):
    windows, prefix, sink = [4, None], 2, 1.5
    theirs = random_model(name)
    ours = with_sink_attention(
        copy.deepcopy(theirs), backend=backend, sinks=sink, window=windows, prefix=prefix
    )
    added = ours.state_dict().keys() - theirs.state_dict().keys()
    assert added == {f"layers.{i}.attn.sinks" for i in range(LAYERS)}
    for number, (layer, attached) in enumerate(zip(theirs.layers, ours.layers, strict=True)):
        assert attached.attn.sinks.tolist() == [sink] * HEADS
        nn.init.normal_(attached.attn.sinks, mean=sink)
        layer.attn._attention_call = Dense(windows[number], prefix, attached.attn.sinks.detach())
    expected = {
        key.replace("_attention_call.", ""): value for key, value in outcome(theirs).items()
    }
    same(outcome(ours), expected)


def test_gemma2_caps_its_scores_and_counts_its_window_as_torchtune_does():
    theirs = random_model("gemma2")
    ours = with_sink_attention(copy.deepcopy(theirs), backend="reference")
    assert [layer.attn.window for layer in ours.layers] == [4, None]
    same(outcome(ours), outcome(theirs))
    uncapped = copy.deepcopy(ours)
    for layer in uncapped.layers:
        layer.attn.softcap = None
    assert (uncapped(TOKENS) - ours(TOKENS)).abs().max() > 1e-2  # the cap is felt
    flex = with_sink_attention(copy.deepcopy(theirs), backend="flex")
    with torch.no_grad():
        torch.testing.assert_close(flex(TOKENS), theirs(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize("name", ["llama2", "qwen2", "phi3", "norms", "gemma2"])
def test_kv_cache_decoding_equals_the_full_forward(name, sink):
    """Left padding included: a padded row decodes as it does alone."""
    model = with_sink_attention(
        random_model(name),
        backend="reference" if name == "gemma2" else "folded",
        sinks=sink,
        window=[4, 9],
        prefix=2,
    ).eval()
    pads = 3
    rows = TOKENS.clone()
    rows[1] = torch.cat([torch.zeros(pads, dtype=torch.long), TOKENS[1, :-pads]])
    with torch.no_grad():
        full = [model(TOKENS[:1])[0], model(TOKENS[1:, :-pads])[0]]
        model.setup_caches(2, torch.float32, decoder_max_seq_len=40)
        assert model.caches_are_enabled()
        slots = torch.arange(40)
        start = torch.tensor([0, pads])
        for first, last in [(0, 11), *((i, i + 1) for i in range(11, T))]:
            at = torch.arange(first, last)
            mask = (slots <= at[:, None]) & (slots >= start[:, None, None])
            mask[1, at < pads, 0] = True  # torchtune lets padding see itself
            positions = (at[None] - start[:, None]).clamp(min=0)
            got = model(rows[:, first:last], mask=mask, input_pos=positions)
            torch.testing.assert_close(got[0], full[0][first:last], rtol=0, atol=1e-4)
            kept = slice(max(first - pads, 0), last - pads)
            torch.testing.assert_close(
                got[1, -(kept.stop - kept.start) :], full[1][kept], rtol=0, atol=1e-4
            )
        model.reset_caches()
        mask = (slots <= torch.arange(T)[:, None]).expand(2, -1, -1)
        again = model(TOKENS, mask=mask, input_pos=torch.arange(T)[None])
        torch.testing.assert_close(again[0], full[0], rtol=0, atol=1e-4)


def test_decoding_equals_torchtunes_own_decoding():
    theirs = random_model("qwen2").eval()
    ours = with_sink_attention(copy.deepcopy(theirs))
    slots = torch.arange(32)
    with torch.no_grad():
        for model in (theirs, ours):
            model.setup_caches(2, torch.float32, decoder_max_seq_len=32)
        for first, last in [(0, 9), (9, 10), (10, 11), (11, 15)]:
            at = torch.arange(first, last)
            inputs = {
                "mask": (slots <= at[:, None]).expand(2, -1, -1),
                "input_pos": at[None].expand(2, -1),
            }
            expected = theirs(TOKENS[:, first:last], **inputs)
            got = ours(TOKENS[:, first:last], **inputs)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
