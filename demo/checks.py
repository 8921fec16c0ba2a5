"""What the demo claims, each claim with what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo.run import GENERATED_TOKENS, Run

LEAST_TOKENS, MEMORY_RATIO, DISK_RATIO = 4096, 0.2, 0.3


@dataclass(frozen=True, slots=True)
class Check:
    """One claim of the demo: what was expected, what was seen, whether it held."""

    claim: str
    seen: str
    held: bool


def judge_runs(runs: dict[str, Run]) -> list[Check]:
    """What the runs "cold", "memory" and "disk" must show."""
    cold, checks = runs["cold"], []
    chunks = cold.stored_chunks
    checks.append(Check("the first process found nothing", f"{cold.loaded_tokens} tokens", cold.loaded_tokens == 0))
    for tier, limit in (("memory", MEMORY_RATIO), ("disk", DISK_RATIO)):
        run = runs[tier]
        ratio = run.ttft_s / cold.ttft_s
        complete = chunks > 0 and run.chunks_by_tier == {tier: chunks} and run.loaded_tokens == run.cacheable_tokens
        seen = ", ".join(f"{count} from {name}" for name, count in run.chunks_by_tier.items()) or "none"
        checks.append(Check(f"all {chunks} chunks came from {tier}", seen, complete))
        checks.append(
            Check(f"the {GENERATED_TOKENS} tokens after a {tier} hit are the cold ones", "identical"
                  if run.generated == cold.generated else "DIFFERENT", run.generated == cold.generated)
        )  # fmt: skip
        wrong = run.zeroed != cold.generated
        checks.append(Check(f"zeroed KV from {tier} gives other tokens", "other" if wrong else "SAME", wrong))
        if cold.prompt_tokens >= LEAST_TOKENS:
            claim = f"time to first token, {tier} hit: at most {limit} of cold"
            checks.append(Check(claim, f"{ratio:.3f}", ratio <= limit))
    return checks


def judge_replay(report: dict[str, Any]) -> list[Check]:
    """What the report of `polarkv replay --json` must show."""
    tiers = f"{report['memory_hits']:,} from memory, {report['disk_hits']:,} from disk"
    return [
        Check("the replay hit in both tiers", tiers, report["memory_hits"] > 0 and report["disk_hits"] > 0),
        Check("no block came back with wrong bytes", f"{report['corrupted']} corrupted", report["corrupted"] == 0),
    ]
