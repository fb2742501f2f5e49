"""A decoder's step for one new token per rollout, with weights laid out for it.

A decode step multiplies a few rows with every weight, so at best it takes the time of reading them.
On a CPU ``F.linear`` takes twice to three times as long, because it lays a weight out anew in every
call. Here oneDNN lays them out once per weight version, those with the same input (q, k, v; gate
and up) as one matrix. That is a second copy of the weights; the model's own are what is trained.

Suffixes: ``B`` rollouts, ``D`` width, ``N`` query heads, ``K`` key heads, ``H`` head dim, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import LoRALinear

from components.attention.rope import RotaryEmbedding, rotate
from components.attention.sink_attention import Attend, SinkAttention
from components.cpu import multiplies_bf16
from components.models.decoder import PolicyModel
from components.models.layers import RMSNorm, is_swiglu, rms_norm
from components.models.lora import AdapterLinear
from components.models.nf4 import is_nf4
from components.models.tune_attention import TuneAttention

Map = Callable[[Tensor], Tensor]
"""Rows ``[B, in]`` to ``[B, out]``."""


def why_not(model: PolicyModel) -> str | None:
    """What stands against packing the weights of a model, as a phrase; None if nothing does."""
    weight = model.tok_embeddings.weight
    if weight.device.type != "cpu":
        return f"the weights are on {weight.device.type}, oneDNN's layouts are for the CPU"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the weights are {weight.dtype}, oneDNN has layouts for float32 and bfloat16"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not multiplies_bf16():
        return "this CPU has no bfloat16 products in oneDNN (AVX-512 at least)"
    return None


class DecodeStep:
    """``model(tokens, mask=attend, ...)`` for one token per rollout, from a copy of the weights.

    The copy is made here and stays as it is: :meth:`is_stale` tells when the model has moved on.
    Adapters are applied beside their base, not merged. What has no packed form (mixtures of
    experts, NF4, other layers) goes through the model's own modules, and counts for nothing in
    ``num_bytes``.

    Args:
        model: on a CPU, fp32 or bf16.
        num_rows: rows of the usual step, for which the layouts are chosen; others work.

    Raises:
        ValueError: a model that :func:`why_not` has something against.
    """

    def __init__(self, model: PolicyModel, *, num_rows: int) -> None:
        problem = why_not(model)
        if problem is not None:
            raise ValueError(f"weights cannot be packed for decoding: {problem}")
        self._model, self._state = model, _state(model)
        self.num_bytes = 0
        self._layers = [self._layer(layer, num_rows) for layer in model.layers]
        self._ropes = {
            id(rope): rope for rope in model.modules() if isinstance(rope, RotaryEmbedding)
        }
        self._head = self._map([_Head(model)], num_rows)

    def is_stale(self) -> bool:
        """Whether a parameter was replaced or changed in place, or an adapter switched, since.

        A change in place through ``parameter.data`` is invisible here.
        """
        return self._state != _state(self._model)

    def __call__(self, tokens: Tensor, *, attend: Attend, input_pos: Tensor) -> Tensor:
        """Run the model.

        Args:
            tokens: ``[B]``, the newest of each rollout.
            attend: of the KV cache.
            input_pos: their positions ``[B]``.

        Returns:
            Logits ``[B, V]`` fp32.
        """
        hidden = self._model.tok_embeddings(tokens)
        turns = {key: rope.turns(input_pos[:, None]) for key, rope in self._ropes.items()}
        for layer in self._layers:
            hidden = layer(hidden, attend, input_pos, turns)
        return self._head(self._model.norm(hidden)).float()

    def _layer(self, layer: nn.Module, num_rows: int) -> Any:
        if not _is_known(layer):
            return _whole(layer)
        assert isinstance(layer, TransformerSelfAttentionLayer)
        attn, mlp = layer.attn, layer.mlp
        assert isinstance(attn, SinkAttention)
        if is_swiglu(mlp):
            gate_up = self._map([mlp.w1, mlp.w3], num_rows)
            down = self._map([mlp.w2], num_rows)
            feed: Map = lambda x: down(_gate(gate_up(x)))  # noqa: E731 (closes over both)
        else:
            feed = lambda x: mlp(x[:, None])[:, 0]  # noqa: E731
        return _Layer(
            layer,
            attn,
            qkv=self._map([attn.q_proj, attn.k_proj, attn.v_proj], num_rows),
            combine=self._map([attn.output_proj], num_rows),
            feed=feed,
        )

    def _map(self, linears: Sequence[Any], num_rows: int) -> Map:
        """Several linears of one input, side by side."""
        dtype = self._model.tok_embeddings.weight.dtype
        if all(_is_packable(linear) and linear.weight.dtype == dtype for linear in linears):
            product = _Product(linears, num_rows=num_rows)
            self.num_bytes += product.num_bytes
            return product
        return lambda x: torch.cat([linear(x) for linear in linears], -1)


class _Head(nn.Module):
    """The head, as a linear without a bias."""

    bias = None

    def __init__(self, model: PolicyModel) -> None:
        super().__init__()
        self.weight = model.head_weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Product:
    """``x W' + b`` with several W stacked, and what their adapters add."""

    def __init__(self, linears: Sequence[Any], *, num_rows: int) -> None:
        weights = [linear.weight.detach() for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        self._bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                w.new_zeros(len(w)) if m.bias is None else m.bias.detach()
                for w, m in zip(weights, linears, strict=True)
            ]
            self._bias = torch.cat(parts)
        self._low: Tensor | None = None
        adapted = [isinstance(m, LoRALinear) and not m.disabled for m in linears]
        if any(adapted):
            self._stack_adapters(linears, adapted)
        small = (self._bias, self._low, *((self._high, self._scale) if any(adapted) else ()))
        self.num_bytes = weight.nbytes + sum(t.nbytes for t in small if t is not None)

    def _stack_adapters(self, linears: Sequence[Any], adapted: Sequence[bool]) -> None:
        """All A below one another, all B as the blocks of one matrix: two products for all."""
        chosen = [m for m, yes in zip(linears, adapted, strict=True) if yes]
        dtype = chosen[0].weight.dtype
        self._low = torch.cat([m.lora_a.weight.detach() for m in chosen]).to(dtype)
        blocks = [
            m.lora_b.weight.detach() if yes else m.weight.new_zeros(len(m.weight), 0)
            for m, yes in zip(linears, adapted, strict=True)
        ]
        self._high = torch.block_diag(*blocks).to(dtype)
        scales = [torch.full((m.rank,), m.alpha / m.rank) for m in chosen]
        self._scale = torch.cat(scales)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        if self._low is not None:
            low = (F.linear(x, self._low) * self._scale).to(x.dtype)
            out += F.linear(low, self._high)
        return out


class _Layer:
    """torchtune's TransformerSelfAttentionLayer for one token per rollout."""

    def __init__(
        self,
        layer: TransformerSelfAttentionLayer,
        attn: SinkAttention,
        *,
        qkv: Map,
        combine: Map,
        feed: Map,
    ) -> None:
        self._attn, self._qkv, self._combine, self._feed = attn, qkv, combine, feed
        self._rope = attn.pos_embeddings
        self._attn_norm, self._feed_norm = _norm(layer.sa_norm), _norm(layer.mlp_norm)
        self._scales = layer.sa_scale, layer.mlp_scale

    def __call__(
        self, x: Tensor, attend: Attend, input_pos: Tensor, turns: dict[int, Tensor]
    ) -> Tensor:
        attn = self._attn
        heads = self._qkv(self._attn_norm(x)).view(len(x), 1, -1, attn.head_dim)
        q, k = self._place(heads, input_pos, turns)
        v = heads[:, :, -attn.num_kv_heads :]
        out = attend.attend(
            attn.layer,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            window=attn.window,
            prefix=attn.prefix,
            sinks=attn.sinks,
            scale=attn.scale,
        )
        out = self._combine(out.reshape(len(x), -1))
        x = self._scales[0](out) + x
        return x + self._scales[1](self._feed(self._feed_norm(x)))

    def _place(
        self, heads: Tensor, input_pos: Tensor, turns: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[B, 1, n, H]``, normed and rotated."""
        attn, rope = self._attn, self._rope
        both = heads[:, :, : -attn.num_kv_heads]
        if not attn.rope_before_norms:
            both = self._norm_heads(both)
        if id(rope) in turns:
            both = rotate(both, turns[id(rope)])
        elif rope is not None:
            both = rope(both, input_pos=input_pos[:, None])
        if attn.rope_before_norms:
            both = self._norm_heads(both)
        return both[:, :, : attn.num_heads], both[:, :, attn.num_heads :]

    def _norm_heads(self, both: Tensor) -> Tensor:
        q_norm, k_norm = self._attn.q_norm, self._attn.k_norm
        if q_norm is None and k_norm is None:
            return both
        q, k = both[:, :, : self._attn.num_heads], both[:, :, self._attn.num_heads :]
        q = q if q_norm is None else q_norm(q)
        return torch.cat([q, k if k_norm is None else k_norm(k)], 2)


def _whole(layer: nn.Module) -> Callable[..., Tensor]:
    """A layer of another kind, as it is."""
    return lambda x, attend, input_pos, _: layer(
        x[:, None], mask=attend, input_pos=input_pos[:, None]
    )[:, 0]


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _norm(norm: nn.Module) -> Map:
    if type(norm) is RMSNorm and norm.scale.dtype != torch.float64:
        return lambda x: rms_norm(x, norm.scale, eps=norm.eps)[0]
    return norm


def _is_known(layer: nn.Module) -> bool:
    if type(layer) is not TransformerSelfAttentionLayer:
        return False
    attn = layer.attn
    if any(map(_has_hooks, (layer, attn, layer.mlp))):
        return False
    if type(attn) is TuneAttention:
        return attn.softcap is None and not attn.cache_enabled and attn.attn_dropout == 0.0
    return type(attn) is SinkAttention and attn.softcap is None


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_packable(linear: Any) -> bool:
    """Whether it is a plain linear map of dense weights, adapted or not."""
    if type(linear) not in (nn.Linear, LoRALinear, AdapterLinear, _Head) or is_nf4(linear.weight):
        return False
    if _has_hooks(linear):
        return False
    return type(getattr(linear, "dropout", None)) in (type(None), nn.Identity)


def _state(model: PolicyModel) -> list[Any]:
    """Changes with every parameter and every switch of an adapter."""
    state: list[Any] = []
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                place = None if is_nf4(parameter) else parameter.data_ptr()
                state += (id(parameter), place, parameter._version)
        state.append(module.__dict__.get("disabled"))
    return state
