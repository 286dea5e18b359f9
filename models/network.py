"""The Qwen3 target and the DFlash draft in plain torch, written for training on a CPU.

Products are in the layer's ``dtype`` (bfloat16 in training), norms and the residual stream in float32.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2048
HIDDEN = 128
HEADS, KV_HEADS, HEAD = 4, 2, 32
INNER, DRAFT_INNER = 192, 384
"""Widths of the MLP. Many narrow layers: a node is cheap beside a pass's fixed cost, as on a large GPU."""
EPSILON = 1e-6
THETA = 10000.0
SHALLOW, GROWTH = 5, 7
"""The target is trained with SHALLOW layers first; then GROWTH layers come from each."""
LAYERS = SHALLOW * GROWTH
TAPS = (7, 19, 31)
"""Target layers whose output the draft reads."""
DRAFT_LAYERS = 3

Weights = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through torch.compile, or as it is where there is no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        print(
            f"no C++ compiler ({compiler}): training runs without torch.compile and takes longer", flush=True
        )
        return function
    result: Callable[..., Any] = torch.compile(function, dynamic=False)
    return result


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square norm over the last dimension, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, EPSILON)


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., HEAD] of the rotary embedding at these positions."""
    frequencies = THETA ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [..., T, HEAD], halves paired."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def heads(x: Tensor, count: int) -> Tensor:
    """[B, T, count * HEAD] to [B, count, T, HEAD]."""
    return x.unflatten(-1, (count, HEAD)).transpose(1, 2)


class Layer(nn.Module):
    """One transformer layer's parameters; q, k, v and gate, up are kept as one matrix each."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        width = (HEADS + 2 * KV_HEADS) * HEAD
        self.qkv = nn.Parameter(torch.randn(width, HIDDEN) * HIDDEN**-0.5)
        self.out = nn.Parameter(torch.randn(HIDDEN, HEADS * HEAD) * 0.3 * HIDDEN**-0.5)
        self.gate_up = nn.Parameter(torch.randn(2 * inner, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN, inner) * 0.3 * inner**-0.5)
        self.q_norm = nn.Parameter(torch.ones(HEAD))
        self.k_norm = nn.Parameter(torch.ones(HEAD))
        self.norm1 = nn.Parameter(torch.ones(HIDDEN))
        self.norm2 = nn.Parameter(torch.ones(HIDDEN))

    def weights(self) -> Weights:
        """All parameters: four matrices, then four norms."""
        return (*self.matrices(), self.q_norm, self.k_norm, self.norm1, self.norm2)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parameters that Muon trains."""
        return self.qkv, self.out, self.gate_up, self.down

    def published(self, prefix: str) -> dict[str, Tensor]:
        """The parameters under the names that Transformers and SGLang use."""
        q, k, v = self.qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD])
        gate, up = self.gate_up.chunk(2)
        named = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": self.out,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down,
            "input_layernorm": self.norm1,
            "post_attention_layernorm": self.norm2,
        }
        return {f"{prefix}{name}.weight": value.detach() for name, value in named.items()}

    def load_published(self, tensors: dict[str, Tensor], prefix: str) -> None:
        """The reverse of ``published``."""

        def joined(*names: str) -> Tensor:
            return torch.cat([tensors[f"{prefix}{name}.weight"].float() for name in names])

        with torch.no_grad():
            self.qkv.copy_(joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
            self.out.copy_(joined("self_attn.o_proj"))
            self.q_norm.copy_(joined("self_attn.q_norm"))
            self.k_norm.copy_(joined("self_attn.k_norm"))
            self.gate_up.copy_(joined("mlp.gate_proj", "mlp.up_proj"))
            self.down.copy_(joined("mlp.down_proj"))
            self.norm1.copy_(joined("input_layernorm"))
            self.norm2.copy_(joined("post_attention_layernorm"))


def project(
    x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, dtype: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, T, HEAD] of a layer's input [B, T, HIDDEN]."""
    qkv, _, _, _, q_norm, k_norm, norm1, _ = weights
    joint = F.linear(rms_norm(x, norm1).to(dtype), qkv.to(dtype))
    q, k, v = joint.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
    q = rotate(rms_norm(heads(q, HEADS), q_norm), cos, sin).to(dtype)
    k = rotate(rms_norm(heads(k, KV_HEADS), k_norm), cos, sin).to(dtype)
    return q, k, heads(v, KV_HEADS)


def finish(x: Tensor, attended: Tensor, weights: Weights, dtype: Any) -> Tensor:
    """Add the attention's result [B, HEADS, T, HEAD] and the MLP to the residual stream."""
    _, out, gate_up, down, _, _, _, norm2 = weights
    x = x + F.linear(attended.transpose(1, 2).flatten(2), out.to(dtype)).float()
    gate, up = F.linear(rms_norm(x, norm2).to(dtype), gate_up.to(dtype)).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down.to(dtype)).float()


def shared(x: Tensor) -> Tensor:
    """Each key or value head once for every query head that reads it."""
    return x.repeat_interleave(HEADS // KV_HEADS, 1)


def causal_layer(x: Tensor, cos: Tensor, sin: Tensor, dtype: Any, *weights: Tensor) -> Tensor:
    """A target layer over whole sequences [B, T, HIDDEN]."""
    q, k, v = project(x, weights, cos, sin, dtype)
    attended = F.scaled_dot_product_attention(q, shared(k), shared(v), is_causal=True)
    return finish(x, attended, weights, dtype)


class Target(nn.Module):
    """A Qwen3 causal language model."""

    def __init__(self, layers: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.5)
        self.head = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(Layer(INNER) for _ in range(layers))
        self.dtype = dtype

    def forward(self, ids: Tensor, layer: Callable[..., Any] = causal_layer) -> Tensor:
        """Logits [B, T, VOCABULARY] of ids [B, T]."""
        x = F.embedding(ids, self.embedding)
        cos, sin = rotary(torch.arange(ids.shape[1]))
        for one in self.layers:
            x = layer(x, cos, sin, self.dtype, *one.weights())
        return F.linear(rms_norm(x, self.norm).to(self.dtype), self.head.to(self.dtype)).float()

    def grown(self) -> Target:
        """GROWTH layers for each one. All but the first of them add nothing yet: same function."""
        deep = Target(len(self.layers) * GROWTH, self.dtype)
        with torch.no_grad():
            for name in ("embedding", "head", "norm"):
                getattr(deep, name).copy_(getattr(self, name))
            for number, layer in enumerate(deep.layers):
                layer.load_state_dict(self.layers[number // GROWTH].state_dict())
                if number % GROWTH:
                    layer.out.zero_()
                    layer.down.zero_()
        return deep

    def published(self) -> dict[str, Tensor]:
        """The parameters under the names that Transformers and SGLang use."""
        named = {
            "model.embed_tokens.weight": self.embedding.detach(),
            "model.norm.weight": self.norm.detach(),
            "lm_head.weight": self.head.detach(),
        }
        for number, layer in enumerate(self.layers):
            named |= layer.published(f"model.layers.{number}.")
        return named

    @classmethod
    def from_published(cls, tensors: dict[str, Tensor], dtype: Any = torch.float32) -> Target:
        """A target with the parameters that ``published`` gave."""
        count = sum(name.endswith(".input_layernorm.weight") for name in tensors)
        target = cls(count, dtype)
        with torch.no_grad():
            target.embedding.copy_(tensors["model.embed_tokens.weight"])
            target.norm.copy_(tensors["model.norm.weight"])
            target.head.copy_(tensors["lm_head.weight"])
        for number, layer in enumerate(target.layers):
            layer.load_published(tensors, f"model.layers.{number}.")
        return target


class Draft(nn.Module):
    """A DFlash draft: [bonus, mask, mask, ...] blocks that see their own rows and the target's features."""

    def __init__(self) -> None:
        super().__init__()
        width = len(TAPS) * HIDDEN
        self.fuse = nn.Parameter(torch.randn(HIDDEN, width) * width**-0.5)
        self.hidden_norm = nn.Parameter(torch.ones(HIDDEN))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(Layer(DRAFT_INNER) for _ in range(DRAFT_LAYERS))

    def weights(self) -> list[Tensor]:
        """All parameters in the order that ``draft_hidden`` takes them."""
        return [
            self.fuse,
            self.hidden_norm,
            self.norm,
            *(w for layer in self.layers for w in layer.weights()),
        ]

    def published(self) -> dict[str, Tensor]:
        """The parameters under the names that SGLang uses."""
        named = {
            "fc.weight": self.fuse.detach(),
            "hidden_norm.weight": self.hidden_norm.detach(),
            "norm.weight": self.norm.detach(),
        }
        for number, layer in enumerate(self.layers):
            named |= layer.published(f"layers.{number}.")
        return named

    @classmethod
    def from_published(cls, tensors: dict[str, Tensor]) -> Draft:
        """A draft with the parameters that ``published`` gave."""
        draft = cls()
        with torch.no_grad():
            draft.fuse.copy_(tensors["fc.weight"])
            draft.hidden_norm.copy_(tensors["hidden_norm.weight"])
            draft.norm.copy_(tensors["norm.weight"])
        for number, layer in enumerate(draft.layers):
            layer.load_published(tensors, f"layers.{number}.")
        return draft


def draft_hidden(
    x: Tensor, features: Tensor, places: Tensor, mask: Tensor, dtype: Any, *weights: Tensor
) -> Tensor:
    """The draft's last hidden state [B, Q, HIDDEN], normed.

    ``x`` [B, Q, HIDDEN] are the blocks' embeddings, ``places`` [B, Q] their positions, ``features``
    [B, T, 3 * HIDDEN] the target's, and ``mask`` [B, 1, Q, T + Q] what each row may see:
    first the context, then the blocks.
    """
    fuse, hidden_norm, norm, *rest = weights
    context = rms_norm(F.linear(features.to(dtype), fuse.to(dtype)), hidden_norm).to(dtype)
    cos, sin = rotary(places[:, None])
    context_cos, context_sin = rotary(torch.arange(features.shape[1]))
    for first in range(0, len(rest), 8):
        layer = rest[first : first + 8]
        q, k, v = project(x, layer, cos, sin, dtype)  # type: ignore[arg-type]
        pair = F.linear(context, layer[0][HEADS * HEAD :].to(dtype))
        context_k, context_v = pair.split([KV_HEADS * HEAD] * 2, -1)
        context_k = rotate(rms_norm(heads(context_k, KV_HEADS), layer[5]), context_cos, context_sin).to(dtype)
        k = torch.cat([context_k, k], 2)
        v = torch.cat([heads(context_v, KV_HEADS), v], 2)
        attended = F.scaled_dot_product_attention(q, shared(k), shared(v), attn_mask=mask)
        x = finish(x, attended, layer, dtype)  # type: ignore[arg-type]
    return rms_norm(x, norm)


def block_logits(
    draft: Draft,
    embedding: Tensor,
    head: Tensor,
    ids: Tensor,
    features: Tensor,
    anchors: Tensor,
    block: int,
    mask_id: int,
    dtype: Any = torch.float32,
    hidden: Callable[..., Any] = draft_hidden,
) -> Tensor:
    """What the draft proposes after each anchor: logits [B, A, block - 1, VOCABULARY].

    ``anchors`` [B, A] are the positions of the bonus tokens in ``ids`` [B, T]; a block reads the features of
    the positions before its anchor. ``embedding`` and ``head`` are the target's.
    """
    batch, count = anchors.shape
    length = features.shape[1]
    places = (anchors[..., None] + torch.arange(block)).flatten(1)
    tokens = torch.full((batch, count, block), mask_id)
    tokens[..., 0] = ids.gather(1, anchors)
    before = (torch.arange(length) < anchors[..., None]).repeat_interleave(block, 1)
    own = torch.block_diag(*[torch.ones(block, block, dtype=torch.bool)] * count).expand(batch, -1, -1)
    mask = torch.cat([before, own], 2)[:, None]
    x = hidden(F.embedding(tokens.flatten(1), embedding), features, places, mask, dtype, *draft.weights())
    x = x.unflatten(1, (count, block))[:, :, 1:].to(dtype)
    return F.linear(x, head.to(dtype)).float()


def layer_parameters(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices, norms) of some layers."""
    matrices = [one for layer in layers for one in layer.matrices()]
    norms = [one for layer in layers for one in layer.weights()[4:]]
    return matrices, norms
