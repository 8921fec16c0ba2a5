"""A small inference engine: a transformers model whose KV lives in one preallocated pool, as real engines keep it.

The pool is a tensor ``[layers, 2, kv_heads, tokens, head_dim]``. Attention reads it in place, and so does the cache
client: a chunk is the scatter list of its runs in the pool, so a load puts every byte where the model will read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from polarkv_client.keys import Namespace

PREFILL_TOKENS = 1024  # prompt tokens a forward pass, as engines do in chunked prefill
WARM_UP_TOKENS = 128
_SEED = 2025

logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """``path`` names a model folder; without it a Llama with random weights is built from ``layers`` and ``hidden``."""

    path: Path | None
    layers: int
    hidden: int

    @property
    def name(self) -> str:
        """How tables and the namespace call the model."""
        return self.path.name if self.path else f"llama-random-{self.layers}x{self.hidden}"


class PooledLayer(DynamicLayer):  # type: ignore[misc]  # transformers' classes are untyped
    """One layer of the KV pool: new tokens are written into it, attention sees a view of it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys[None], values[None]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.adopt(0)

    def adopt(self, tokens: int) -> None:
        """Take the first ``tokens`` of the pool as this sequence's KV."""
        self._length = tokens
        self.keys, self.values = self._keys[:, :, :tokens], self._values[:, :, :tokens]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, new, head_dim]`` twice; returns all keys and values so far, as views."""
        start, end = self._length, self._length + key_states.shape[-2]
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self.adopt(end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length


class Engine:
    """A model, its KV pool, and greedy decoding. Loading and warm-up happen here, before any clock starts."""

    def __init__(self, choice: ModelChoice, max_tokens: int, chunk_tokens: int) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(_SEED)
        self.name = choice.name
        self.chunk_tokens = chunk_tokens
        self._path = choice.path
        self._model = _load_model(choice, max_tokens)
        self._fingerprint = _fingerprint(self._model)
        self._pool = self._allocate(max_tokens)
        self._cache = DynamicCache()
        self._cache.layers = [PooledLayer(keys, values) for keys, values in self._pool]
        self._bytes = memoryview(self._pool.view(torch.uint8).flatten().numpy())
        self.prefill(list(range(4, 4 + WARM_UP_TOKENS)))
        self.decode(1, 2)
        self.adopt(0)

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return sum(p.numel() for p in self._model.parameters())

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, over all layers."""
        layers, two, heads, _, dim = self._pool.shape
        return int(layers * two * heads * dim * self._pool.element_size())

    def namespace(self, tenant_salt: str) -> Namespace:
        """Everything that this engine's KV depends on."""
        return Namespace(
            model_id=self.name,
            weights_fingerprint=self._fingerprint,
            chunk_tokens=self.chunk_tokens,
            kv_dtype=str(self._pool.dtype).removeprefix("torch."),
            layout="layer,kv,head,token,dim",
            page_size=self.chunk_tokens,
            tenant_salt=tenant_salt,
        )

    def prompt(self, tokens: int) -> list[int]:
        """A prompt of that many token ids, the same in every process: random ones, which no compression can help."""
        dice = torch.Generator().manual_seed(_SEED)
        return list(torch.randint(4, self._model.config.vocab_size, (tokens,), generator=dice).tolist())

    def chunk_buffers(self, tokens: int) -> list[list[memoryview]]:
        """For each whole chunk of the first ``tokens``, its runs of bytes in the pool: one a layer, K or V, head."""
        layers, two, heads, capacity, dim = self._pool.shape
        token_bytes = dim * self._pool.element_size()
        run_bytes = self.chunk_tokens * token_bytes
        rows = [row * capacity * token_bytes for row in range(layers * two * heads)]
        view = self._bytes
        return [
            [view[row + at : row + at + run_bytes] for row in rows]
            for at in range(0, tokens // self.chunk_tokens * run_bytes, run_bytes)
        ]

    def adopt(self, tokens: int) -> None:
        """Take what lies in the pool as the KV of the prompt's first ``tokens``."""
        for layer in self._cache.layers:
            layer.adopt(tokens)

    def zero(self, tokens: int) -> None:
        """Overwrite the KV of the first ``tokens`` with zeros (the negative control)."""
        self._pool[:, :, :, :tokens] = 0

    def prefill(self, tokens: Sequence[int]) -> int:
        """Compute the prompt from where the KV ends (see :meth:`adopt`); returns the first generated token.

        A pass never crosses the end of the last whole chunk: the rest is then computed in a pass of the same shape with
        and without a hit, and equal tokens are a matter of equal KV, not of rounding.
        """
        cacheable = (len(tokens) - 1) // self.chunk_tokens * self.chunk_tokens
        start, logits = self._cache.get_seq_length(), None
        while start < len(tokens):
            end = min(start + PREFILL_TOKENS, cacheable if start < cacheable else len(tokens))
            logits = self._forward(tokens[start:end])
            start = end
        if logits is None:
            raise ValueError(f"nothing left to compute: {start} of {len(tokens)} tokens are in the pool")
        return int(logits.argmax())

    def decode(self, first: int, tokens: int) -> list[int]:
        """``tokens`` generated tokens, ``first`` among them."""
        generated = [first]
        while len(generated) < tokens:
            generated.append(int(self._forward(generated[-1:]).argmax()))
        return generated

    def text(self, tokens: Sequence[int]) -> str | None:
        """The tokens as text, where the model came with a tokenizer."""
        if self._path is None or not any(self._path.glob("tokenizer*")):
            return None
        return str(AutoTokenizer.from_pretrained(self._path).decode(list(tokens)))

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            out = self._model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1]

    def _allocate(self, max_tokens: int) -> torch.Tensor:
        """The KV pool, touched, in the shape that a probe of the model shows."""
        with torch.inference_mode():
            probe = self._model(input_ids=torch.tensor([[4, 5]]), use_cache=True).past_key_values
        shapes = {tuple(t.shape[1::2]) for layer in probe.layers for t in (layer.keys, layer.values)}
        plain = all(type(layer) is DynamicLayer for layer in probe.layers)
        if len(shapes) != 1 or not plain:
            raise SystemExit(f"--model: {self.name} has windowed or mixed attention; name one with full attention only")
        heads, dim = shapes.pop()
        return torch.zeros(len(probe.layers), 2, heads, max_tokens, dim, dtype=probe.layers[0].keys.dtype)


def _load_model(choice: ModelChoice, max_tokens: int) -> Any:
    if choice.path is not None:
        if not (choice.path / "config.json").is_file():
            raise SystemExit(f"--model: {choice.path} has no config.json; name a folder in the Hugging Face format")
        return AutoModelForCausalLM.from_pretrained(choice.path, dtype=torch.bfloat16, local_files_only=True).eval()
    heads = choice.hidden // 64
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=choice.hidden,
        intermediate_size=choice.hidden * 11 // 4,
        num_hidden_layers=choice.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=64,
        max_position_embeddings=max(16_384, max_tokens),
        initializer_range=0.05,  # wide enough that every token depends on the whole prompt
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def _fingerprint(model: Any) -> str:
    """XXH3-128 over every weight, in the order of their names."""
    digest = xxhash.xxh3_128()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
