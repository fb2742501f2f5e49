"""What attaching refuses, keeps and works together with."""

import copy

import pytest
import torch
from torch import nn
from torchtune.models.gemma2 import gemma2
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules import (
    TransformerCrossAttentionLayer,
    delete_kv_caches,
    disable_kv_cache,
    local_kv_cache,
)
from torchtune.modules.peft import disable_adapter, get_adapter_params

from components.attention.plan import MaskPlan
from components.models.attach import with_sink_attention
from tests.unit.attention.cases import random_tree

SIZES = {
    "vocab_size": 31,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 24,
    "max_seq_len": 200,
}
TOKENS = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))


def model(**settings):
    torch.manual_seed(0)
    return with_sink_attention(qwen2(**SIZES), **settings)


def causal(num_new: int, slots: int, start: int = 0):
    return (torch.arange(slots) <= torch.arange(start, start + num_new)[:, None]).expand(2, -1, -1)


def test_a_packed_tree_equals_each_rollout_alone():
    tree = random_tree(3, num_nodes=8, max_len=20)
    attached = model(sinks=0.5, window=[5, None], prefix=2)
    tokens = torch.randint(0, 31, (1, len(tree)))
    packed = attached(tokens, mask=MaskPlan.from_tree(tree), input_pos=tree.position[None])[0]
    leaves = 0
    for last in range(len(tree)):
        on_path = (tree.enter <= tree.enter[last]) & (tree.enter[last] < tree.exit)
        path = torch.nonzero(on_path & (tree.position <= tree.position[last])).flatten()
        if tree.exit[last] != tree.enter[last] + 1:
            continue  # not in a leaf
        leaves += 1
        alone = attached(tokens[:, path])[0, -1]
        torch.testing.assert_close(packed[last], alone, rtol=0, atol=2e-5)
    assert leaves > 10


def test_folded_and_reference_agree_in_a_torchtune_model():
    folded = model(sinks=0.5, window=3, prefix=2, backend="folded")
    reference = model(sinks=0.5, window=3, prefix=2, backend="reference")
    torch.testing.assert_close(folded(TOKENS), reference(TOKENS), rtol=0, atol=1e-5)


def test_sinks_take_the_weights_dtype_and_train():
    attached = with_sink_attention(qwen2(**SIZES).to(torch.bfloat16), sinks=-1.0)
    sinks = attached.layers[1].attn.sinks
    assert sinks.dtype == torch.bfloat16
    attached(TOKENS).square().mean().backward()
    assert sinks.grad.abs().min() > 0


def test_sinks_are_there_even_where_the_model_is_built_on_meta():
    with torch.device("meta"):
        built = qwen2(**SIZES)
    assert with_sink_attention(built, sinks=3.0).layers[0].attn.sinks.tolist() == [3.0] * 4


def test_lora_projections_stay_adapters():
    torch.manual_seed(0)
    lora = lora_qwen2(["q_proj", "v_proj"], **SIZES, lora_rank=2, lora_alpha=4.0)
    names = set(get_adapter_params(lora))
    base = with_sink_attention(copy.deepcopy(lora))(TOKENS)
    attached = with_sink_attention(lora)
    assert set(get_adapter_params(attached)) == names
    assert len(names) == 8
    for name, parameter in attached.named_parameters():
        if ".lora_b." in name:
            nn.init.normal_(parameter)
    assert (attached(TOKENS) - base).abs().max() > 0.1
    with disable_adapter(attached):
        assert torch.equal(attached(TOKENS), base)


def test_torchtunes_cache_contexts_work():
    attached = model(sinks=0.5, window=3).eval()
    with torch.no_grad():
        full = attached(TOKENS)
        settings = {"batch_size": 2, "device": torch.device("cpu"), "dtype": torch.float32}
        with local_kv_cache(attached, **settings, decoder_max_seq_len=20):
            positions = torch.arange(12).expand(2, -1)
            got = attached(TOKENS, mask=causal(12, 20), input_pos=positions)
            torch.testing.assert_close(got, full, rtol=0, atol=1e-5)
            with disable_kv_cache(attached):
                torch.testing.assert_close(attached(TOKENS), full, rtol=0, atol=1e-5)
        assert not attached.caches_are_setup()
        attached.setup_caches(2, torch.float32)
        with pytest.raises(ValueError, match=r"layer 0 has a KV cache already.*delete_kv_caches"):
            attached.setup_caches(2, torch.float32)
        plan = MaskPlan.causal(12)
        with pytest.raises(ValueError, match=r"KV caches are enabled.*not MaskPlan.*disable_kv"):
            attached(TOKENS, mask=plan, input_pos=positions)
        with pytest.raises(ValueError, match=r"mask must be bool \[B, 12, 200\].*\[2, 12, 20\]"):
            attached(TOKENS, mask=causal(12, 20), input_pos=positions)
        delete_kv_caches(attached)
        with pytest.raises(RuntimeError, match="no KV cache to reset"):
            attached.layers[0].attn.reset_cache()


def test_a_dense_mask_is_for_dense_attention():
    positions = torch.arange(12).expand(2, -1)
    reference = model(backend="reference", sinks=0.5, window=3, prefix=1)
    mask = causal(12, 12)
    expected = reference(TOKENS)
    torch.testing.assert_close(
        reference(TOKENS, mask=mask, input_pos=positions), expected, rtol=0, atol=1e-5
    )
    with pytest.raises(ValueError, match="backend = 'auto' is not: pass a MaskPlan"):
        model()(TOKENS, mask=mask, input_pos=positions)


def test_a_window_needs_to_know_its_positions():
    positions = torch.arange(12).expand(2, -1)
    attached = model(window=3)
    assert torch.equal(attached(TOKENS, input_pos=positions), attached(TOKENS))
    with pytest.raises(ValueError, match=r"window = 3 with positions other than.*MaskPlan"):
        attached(TOKENS, input_pos=positions + 1)
    model()(TOKENS, input_pos=positions + 1)


def test_dropout_is_refused_in_training_only():
    attached = with_sink_attention(qwen2(**SIZES, attn_dropout=0.1))
    with pytest.raises(ValueError, match=r"attn_dropout = 0.1: SinkAttention has no dropout"):
        attached(TOKENS)
    attached.eval()(TOKENS)


def capped(**settings):
    return with_sink_attention(gemma2(**SIZES, head_dim=8), **settings)


def test_a_soft_cap_is_refused_by_what_cannot_do_it():
    with pytest.raises(ValueError, match=r"softcap = 50.0: backend 'folded' cannot cap scores"):
        capped(backend="folded")
    with pytest.raises(ValueError, match=r"softcap = 50.0: backend 'folded'.*'flex'.*'reference'"):
        capped()(TOKENS)  # auto is folded on a CPU

    class Cache:
        def attend(self, *args, **settings):
            raise AssertionError

    with pytest.raises(ValueError, match=r"softcap = 50.0: Cache merges pieces"):
        capped(backend="reference").layers[0].attn(torch.randn(1, 3, 32), mask=Cache())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "flash"}, "backend must be one of .*'auto', 'flex', 'folded', 'reference'"),
        ({"window": -1}, "window must be None or >= 0, got -1"),
        ({"window": [1, 2, 3]}, "window lists 3 layers, the model has 2"),
        ({"window": "auto"}, "window = 'auto': must be a number.*'model'"),
        ({"prefix": -1}, "prefix must be >= 0, got -1"),
    ],
)
def test_bad_settings_leave_the_model_as_it_was(settings, message):
    untouched = qwen2(**SIZES)
    with pytest.raises(ValueError, match=message):
        with_sink_attention(untouched, **settings)
    with_sink_attention(untouched)


def test_what_cannot_be_replaced_is_named():
    with pytest.raises(ValueError, match=r"layer 0 \(TransformerSelfAttentionLayer\) has Sink"):
        with_sink_attention(model())
    cached = qwen2(**SIZES)
    cached.setup_caches(2, torch.float32)
    with pytest.raises(ValueError, match="has a KV cache: attach first"):
        with_sink_attention(cached)
    encoder = qwen2(**SIZES)
    encoder.layers[1].attn.is_causal = False
    with pytest.raises(ValueError, match=r"layer 1 .*is_causal = False"):
        with_sink_attention(encoder)
    cross = qwen2(**SIZES)
    cross.layers[1].attn.pos_embeddings = None
    cross.layers[1] = TransformerCrossAttentionLayer(cross.layers[1].attn, nn.Identity())
    with pytest.raises(ValueError, match=r"layer 1 \(TransformerCrossAttentionLayer\): only"):
        with_sink_attention(cross)
