"""A gpt-oss as modules: on the meta device, to be loaded, or with random weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torchtune.modules import TransformerSelfAttentionLayer

from components.attention.rope import RotaryEmbedding
from components.attention.sink_attention import SinkAttention
from components.models.decoder import PolicyModel
from components.models.gpt_oss.config import GptOssConfig
from components.models.gpt_oss.experts import ExpertLinear, Experts
from components.models.gpt_oss.moe import MixtureOfExperts
from components.models.gpt_oss.packed import FROZEN, PackedExpertLinear, stream_experts
from components.models.gpt_oss.rope import YarnRotaryEmbedding
from components.models.layers import RMSNorm


def build(
    config: GptOssConfig,
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    experts: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """A gpt-oss whose parameters are on the meta device: shapes and names without data.

    Args:
        config: sizes.
        dtype: of all parameters but the sinks, which are float32: in bfloat16 a logit of 10 could
            not move by less than 0.06.
        backend: of the attention: auto, folded, flex or reference.
        experts: how the products of the experts run: auto, grouped or loop; or packed, or streamed:
            frozen in MXFP4. Call ``stream_experts`` when streamed ones are loaded.
        checkpoint_activations: compute each layer again in the backward pass.
        offload_activations: move what the layers keep for the backward pass to host memory
            meanwhile; CUDA only.

    Raises:
        ValueError: an unknown backend or method.
    """
    rope = rotary(config)
    with torch.device("meta"):
        model = PolicyModel(
            config,
            tok_embeddings=nn.Embedding(config.vocab_size, config.embed_dim),
            layers=[
                TransformerSelfAttentionLayer(
                    _attention(config, number, rope, backend),  # pyright: ignore[reportArgumentType]
                    _moe(config, experts),
                    sa_norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
                    mlp_norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
                )
                for number in range(config.num_layers)
            ],
            norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
            output=None
            if config.tie_word_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=False),
            checkpoint_activations=checkpoint_activations,
            offload_activations=offload_activations,
        )
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue  # packed
            wanted = torch.float32 if name.endswith(".attn.sinks") else dtype
            parameter.data = parameter.data.to(wanted)
    return model


def random_gpt_oss(
    config: GptOssConfig,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    std: float = 0.02,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    experts: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """A gpt-oss with random weights, for tests and measurements.

    Args:
        config: sizes, e.g. GPT_OSS_20B.
        dtype: of all parameters but the sinks.
        seed: of the weights.
        std: of all weights, biases and sinks; scales of norms are 1.
        device: where the model goes.
        backend: as in :func:`build`.
        experts: as in :func:`build`.
        checkpoint_activations: as in :func:`build`.
        offload_activations: as in :func:`build`.

    Raises:
        ValueError: as in :func:`build`.
    """
    model = build(
        config,
        dtype=dtype,
        backend=backend,
        experts=experts,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if name.endswith(".scale"):
            value.fill_(1.0)
        elif name.endswith(".blocks"):
            value.random_(0, 256, generator=generator)
        elif name.endswith(".scales"):
            value.random_(119, 123, generator=generator)  # 2 ** -8 to 2 ** -5
        else:
            value.normal_(std=std, generator=generator)
        owner, _, attribute = name.rpartition(".")
        setattr(
            model.get_submodule(owner), attribute, nn.Parameter(value, value.is_floating_point())
        )
    if experts == "streamed":
        stream_experts(model)
    return model.to(device)


def rotary(config: GptOssConfig) -> RotaryEmbedding:
    """The rotary embedding that all layers share."""
    settings = {"max_positions": config.max_positions, "base": config.rope_base}
    if config.yarn is None:
        return RotaryEmbedding(config.head_dim, **settings)
    return YarnRotaryEmbedding(config.head_dim, yarn=config.yarn, **settings)


def _attention(
    config: GptOssConfig, number: int, rope: RotaryEmbedding, backend: str
) -> SinkAttention:
    width, head_dim = config.embed_dim, config.head_dim
    query_dim, key_dim = config.num_heads * head_dim, config.num_kv_heads * head_dim
    return SinkAttention(
        layer=number,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        q_proj=nn.Linear(width, query_dim),
        k_proj=nn.Linear(width, key_dim),
        v_proj=nn.Linear(width, key_dim),
        output_proj=nn.Linear(query_dim, width),
        pos_embeddings=rope,
        sinks=nn.Parameter(torch.empty(config.num_heads)),
        window=config.layer_windows[number],
        backend=backend,
    )


def _moe(config: GptOssConfig, method: str) -> MixtureOfExperts:
    width, num_experts = config.embed_dim, config.num_experts
    linear = PackedExpertLinear if method in FROZEN else partial(ExpertLinear, method=method)
    experts = Experts(
        gate_up_proj=linear(num_experts, width, 2 * config.ffn_dim),
        down_proj=linear(num_experts, config.ffn_dim, width),
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
    )
    return MixtureOfExperts(
        router=nn.Linear(width, num_experts),
        experts=experts,
        num_experts=num_experts,
        experts_per_token=config.experts_per_token,
    )
