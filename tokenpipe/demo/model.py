"""glassllm's English model as a batched numpy forward pass, a key/value cache per row.

The package's own forward is built to be looked at: one sequence, autograd, concatenated caches.
Here the same weights serve a batch of rows of different length. Sampling is at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenpipe.demo.errors import MissingExtraError

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def load_pretrained() -> tuple[Any, Any]:
    """Returns glassllm's English model and tokenizer."""
    try:
        import glassllm
    except ModuleNotFoundError as error:
        raise MissingExtraError("glassllm", "load the demo's language model") from error
    model, tokenizer = glassllm.load_pretrained("en")
    return model, tokenizer


@dataclass(frozen=True)
class _Layer:
    norm_attention: Floats
    query_key_value: Floats  # one product instead of three
    output: Floats
    norm_mlp: Floats
    gate_up: Floats
    down: Floats


class BatchedModel:
    """The weights and the caches of `max_rows` rows. Not thread-safe: one loop drives it."""

    def __init__(self, pretrained: Any, max_rows: int) -> None:
        config = pretrained.cfg
        self.vocab_size: int = config.vocab_size
        self.context_tokens: int = config.max_len
        self._eps: float = config.eps
        self._num_kv_heads: int = config.n_kv_heads
        self._group_size: int = config.n_heads // config.n_kv_heads  # query heads per kv head
        self._head_size: int = config.d_model // config.n_heads
        self._embedding: Floats = pretrained.E.data
        self._norm_final: Floats = pretrained.norm_f.gamma.data
        self._layers = [_read_layer(block) for block in pretrained.blocks]
        self._cos: Floats = pretrained.blocks[0].attn.cos
        self._sin: Floats = pretrained.blocks[0].attn.sin
        shape = (
            len(self._layers), max_rows, self._num_kv_heads, self.context_tokens, self._head_size,
        )  # fmt: skip
        # zeros, not empty: pages come with first use, and what lies beyond a row's end is masked
        # after a product with it, so it must be finite.
        self._keys: Floats = np.zeros(shape, np.float32)
        self._values: Floats = np.zeros(shape, np.float32)

    def prefill(self, rows: Ints, prompts: list[list[int]]) -> Floats:
        """Fills the rows' caches with their prompts; returns the logits after each prompt's end."""
        lengths = np.array([len(prompt) for prompt in prompts])
        tokens = np.zeros((len(prompts), lengths.max()), np.int64)
        for padded, prompt in zip(tokens, prompts, strict=True):
            padded[: len(prompt)] = prompt
        # What a shorter prompt's padding leaves in its cache is overwritten before it is attended.
        hidden = self._forward(rows, tokens, np.zeros(len(prompts), np.int64))
        return self._logits(hidden[np.arange(len(prompts)), lengths - 1])

    def decode(self, rows: Ints, tokens: Ints, positions: Ints) -> Floats:
        """Runs one token per row, at the row's position; returns the logits of the next ones."""
        return self._logits(self._forward(rows, tokens[:, None], positions)[:, 0])

    def _logits(self, hidden: Floats) -> Floats:
        return self._norm(hidden, self._norm_final) @ self._embedding.T

    def _forward(self, rows: Ints, tokens: Ints, starts: Ints) -> Floats:
        """Hidden states of tokens[n, q], row i's at positions starts[i], starts[i] + 1, ..."""
        positions = starts[:, None] + np.arange(tokens.shape[1])
        num_keys = int(positions.max()) + 1
        is_hidden = np.arange(num_keys) > positions[:, :, None]
        mask = np.where(is_hidden, np.float32(-np.inf), np.float32(0))
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            normed = self._norm(x, layer.norm_attention)
            x = x + self._attention(index, layer, normed, rows, positions, mask)
            gate, up = np.split(self._norm(x, layer.norm_mlp) @ layer.gate_up, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
        return x

    def _attention(
        self, index: int, layer: _Layer, x: Floats, rows: Ints, positions: Ints, mask: Floats
    ) -> Floats:
        num_rows, num_queries, num_keys = mask.shape
        kv_heads, group, size = self._num_kv_heads, self._group_size, self._head_size
        heads = (x @ layer.query_key_value).reshape(num_rows, num_queries, -1, size)
        query, key, value = np.split(heads, [kv_heads * group, kv_heads * (group + 1)], axis=2)
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        # An index array on each side of a slice puts the indexed axes first: [row, query, kv head].
        self._keys[index][rows[:, None], :, positions] = key
        self._values[index][rows[:, None], :, positions] = value
        keys = self._keys[index, rows, :, :num_keys]
        values = self._values[index, rows, :, :num_keys]

        # The query heads of a group share their kv head: they are more queries of one product.
        query = query.reshape(num_rows, num_queries, kv_heads, group, size)
        query = query.transpose(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, -1, size)
        scores = query @ keys.swapaxes(2, 3) / np.float32(np.sqrt(size))
        scores = scores.reshape(num_rows, kv_heads, group, num_queries, num_keys)
        weights = _softmax(scores + mask[:, None, None])
        mixed = weights.reshape(num_rows, kv_heads, -1, num_keys) @ values
        mixed = mixed.reshape(num_rows, kv_heads, group, num_queries, size)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(num_rows, num_queries, -1)
        result: Floats = np.matmul(mixed, layer.output)
        return result

    def _norm(self, x: Floats, gamma: Floats) -> Floats:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + self._eps) * gamma
        return normed

    def _rotate(self, x: Floats, positions: Ints) -> Floats:
        """Rotary embedding: each pair of neighbours turns by its position's angle."""
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * cos - odd * sin
        turned[..., 1::2] = even * sin + odd * cos
        return turned


def _read_layer(block: Any) -> _Layer:
    attention, mlp = block.attn, block.ffn
    return _Layer(
        norm_attention=block.norm1.gamma.data,
        query_key_value=np.hstack([attention.W_Q.data, attention.W_K.data, attention.W_V.data]),
        output=attention.W_O.data,
        norm_mlp=block.norm2.gamma.data,
        gate_up=np.hstack([mlp.W1.data, mlp.W3.data]),
        down=mlp.W2.data,
    )


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return result


def log_softmax(logits: Floats) -> Floats:
    """Logarithms of the softmax over the last axis, in the precision of the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@dataclass(frozen=True)
class Sampled:
    """One sampled token per row, as an engine hands it to the output path (n rows, T = top + 1)."""

    tokens: Ints  # [n]
    topk_ids: Ints  # [n, T]; column 0 the sampled token, then the most likely ones in order
    logprobs: Floats  # [n, T]; the model's own, before temperature
    ranks: Ints  # [n]; 1 = the most likely token


def sample(logits: Floats, uniforms: NDArray[np.float64], temperature: float, top: int) -> Sampled:
    """Draws a token per row from softmax(logits / temperature); temperature 0 takes the likeliest.

    `uniforms` holds one number of [0, 1) per row, so that the caller owns the randomness.
    """
    logprobs = log_softmax(logits)
    if temperature == 0:
        tokens = logprobs.argmax(axis=1)
    else:
        scaled = logits.astype(np.float64) / temperature
        scaled -= scaled.max(axis=1, keepdims=True)
        cumulative = np.exp(scaled).cumsum(axis=1)
        below = cumulative <= uniforms[:, None] * cumulative[:, -1:]
        # uniforms just under 1 can round up to the total, which is below nothing.
        tokens = np.minimum(below.sum(axis=1), logits.shape[1] - 1)
    top_ids = np.argpartition(-logprobs, max(top - 1, 0), axis=1)[:, :top]
    top_ids.sort(axis=1)  # equal logprobs come in the order of their ids
    order = np.argsort(-np.take_along_axis(logprobs, top_ids, axis=1), axis=1, kind="stable")
    topk_ids = np.hstack([tokens[:, None], np.take_along_axis(top_ids, order, axis=1)])
    topk_logprobs = np.take_along_axis(logprobs, topk_ids, axis=1)
    ranks = (logprobs > topk_logprobs[:, :1]).sum(axis=1) + 1
    return Sampled(tokens, topk_ids, topk_logprobs, ranks)
