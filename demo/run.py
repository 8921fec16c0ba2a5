"""What one inference process of the demo reports; read without loading a model's libraries."""

from __future__ import annotations

from dataclasses import dataclass, field

GENERATED_TOKENS = 32


@dataclass
class Run:
    """What one process saw. Seconds are wall time; ``ttft_s`` runs from the prompt's arrival to the first new token."""

    model: str
    parameters: int
    bytes_per_token: int
    prompt_tokens: int
    cacheable_tokens: int
    ready_s: float = 0.0
    ttft_s: float = 0.0
    lookup_s: float = 0.0
    compute_s: float = 0.0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    chunks_by_tier: dict[str, int] = field(default_factory=dict)
    store_s: float = 0.0
    stored_chunks: int = 0
    stored_bytes: int = 0
    generated: list[int] = field(default_factory=list)
    text: str | None = None
    zeroed: list[int] = field(default_factory=list)
