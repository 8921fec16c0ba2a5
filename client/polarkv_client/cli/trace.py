"""Traces of requests: read one from a file, make one from a seed, and say what a plain LRU of blocks would hit.

A trace is one JSON object a line, as in the public conversation trace of Mooncake (FAST '25)::

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

``timestamp`` is in milliseconds, lengths in tokens; ``hash_ids`` name the blocks of the prompt (512 tokens each, the
last one partly filled), and two requests that share the first n ids share the first n blocks.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from polarkv_client.errors import ConfigurationError

BLOCK_TOKENS = 512
CONVERSATION_REQUESTS = 12_031
DEFAULT_SEED = 2

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]


class Request(msgspec.Struct, frozen=True, rename={"timestamp_ms": "timestamp"}):
    """One request of a trace. Lengths are in tokens."""

    timestamp_ms: _Count
    input_length: _Count
    output_length: _Count
    hash_ids: list[_HashId]


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a trace file, in its order, one line at a time.

    Raises:
        ConfigurationError: the file cannot be read, or a line is no request; the text names line and field.
    """
    decoder = msgspec.json.Decoder(Request)
    try:
        lines = path.open("rb")
    except OSError as error:
        raise ConfigurationError("trace", str(path), f"name a readable trace file ({error.strerror})") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                shown = line.decode("utf-8", "replace").strip()
                raise ConfigurationError(
                    f"{path.name}, line {number}", shown[:80] + "…" * (len(shown) > 80), f"{error}; {_SHAPE}"
                ) from error


_SHAPE = "each line is an object with timestamp (ms), input_length, output_length and hash_ids (integers)"


def lru_hit_rate(trace: Iterable[Request], blocks: int | None = None) -> float:
    """Part of the block references (0 … 1) that an LRU of ``blocks`` blocks would hit; None = without limit.

    A request looks up all its blocks and then holds them, as a cache does that stores what it missed.
    """
    held: OrderedDict[int, None] = OrderedDict()
    references = hits = 0
    for request in trace:
        for block in request.hash_ids:
            references += 1
            if block in held:
                hits += 1
                held.move_to_end(block)
            else:
                held[block] = None
                if blocks is not None and len(held) > blocks:
                    held.popitem(last=False)
    return hits / references if references else 0.0


# What the generator imitates: figures measured on the conversation trace, each as (share of requests, value), straight
# lines between. Blocks and requests are counts, output lengths tokens.
_Curve = Sequence[tuple[float, float]]
_FIRST_BLOCKS: _Curve = (
    (0.0, 1), (0.05, 1), (0.25, 2), (0.5, 9), (0.75, 23), (0.9, 46), (0.95, 71), (0.99, 165), (1.0, 246),
)  # fmt: skip
_ADDED_BLOCKS: _Curve = (
    (0.0, 1), (0.05, 1), (0.25, 2), (0.5, 2), (0.75, 7), (0.9, 18), (0.95, 27), (0.99, 50), (1.0, 150),
)  # fmt: skip
_RETURN_AFTER: _Curve = (
    (0.0, 20), (0.05, 105), (0.25, 245), (0.5, 450), (0.75, 960), (0.9, 1700), (0.95, 2150), (0.99, 5110), (1.0, 10514),
)  # fmt: skip
_OUTPUT_TOKENS: _Curve = (
    (0.0, 1), (0.05, 10), (0.25, 156), (0.5, 350), (0.75, 472), (0.9, 597), (0.95, 698), (0.99, 1120), (1.0, 2000),
)  # fmt: skip
_RETURNING = 0.42  # share of requests that go on with an earlier one; some find none to go on with and start anew
_BRANCHING = 0.18  # share of those that keep only a part of the earlier prompt
_SPAN_MS = 3_537_000
_TICK_MS = 3_000


def generate_trace(seed: int, requests: int = CONVERSATION_REQUESTS) -> Iterator[Request]:
    """A trace of conversations that share one system prompt, statistically like the public conversation trace.

    People come back to their conversation after a while; the prompt is then the earlier one, whose last, partly filled
    block has changed, and some blocks more. With the default length the numbers of references and of distinct blocks
    come out within 5 % of that trace, the hit rates of LRUs of 1,000 blocks and more within 2.5 points: a test holds it
    to that.
    """
    if requests < 1:
        raise ConfigurationError("requests", requests, "generate at least one request")
    dice = random.Random(seed)
    open_tips: list[int] = []  # numbers of the requests that nobody has gone on with, in order
    prompts: dict[int, list[int]] = {}
    next_block = 1
    for number in range(requests):
        kept = [0]
        added = _draw(dice, _FIRST_BLOCKS)
        if dice.random() < _RETURNING:
            earlier = _take_tip(open_tips, number - _draw(dice, _RETURN_AFTER))
            if earlier is not None:
                kept = _kept_part(dice, prompts.pop(earlier))
                added = _draw(dice, _ADDED_BLOCKS)
        prompt = kept + list(range(next_block, next_block + added))
        next_block += added
        prompts[number] = prompt
        open_tips.append(number)
        yield Request(
            timestamp_ms=number * _SPAN_MS // CONVERSATION_REQUESTS // _TICK_MS * _TICK_MS,
            input_length=(len(prompt) - 1) * BLOCK_TOKENS + dice.randint(1, BLOCK_TOKENS),
            output_length=_draw(dice, _OUTPUT_TOKENS),
            hash_ids=prompt,
        )


def _draw(dice: random.Random, curve: _Curve) -> int:
    """A value whose distribution is the curve's."""
    share = dice.random()
    right = max(1, bisect_left(curve, (share, 0.0)))
    (share_a, value_a), (share_b, value_b) = curve[right - 1], curve[right]
    return round(value_a + (value_b - value_a) * (share - share_a) / (share_b - share_a))


def _take_tip(open_tips: list[int], wanted: int) -> int | None:
    """The open request next to number ``wanted``, no longer open; None when the trace is too young for it."""
    if wanted < 0 or not open_tips:
        return None
    return open_tips.pop(min(bisect_left(open_tips, wanted), len(open_tips) - 1))


def _kept_part(dice: random.Random, prompt: list[int]) -> list[int]:
    """What a follow-up shares with the earlier prompt: all but its last block, or less where the user branched off."""
    whole = max(1, len(prompt) - 1)
    return prompt[: dice.randint(1, whole) if dice.random() < _BRANCHING else whole]
