"""Summaries of evidence, complete in every field, as `verify` and a run on a GPU write them."""

from typing import Any

SCHEDULES = ["eager", "late", "random"]


def summary(level: str, target: str = "sm_90a", **changes: Any) -> dict[str, Any]:
    """The summary of a level; 12 acceptance cases, those of a dense forward, unless changed."""
    counts = dict.fromkeys(("spill_bytes", "local_bytes", "shared_bytes", "tmem_columns"), 0)
    rows: dict[str, dict[str, Any]] = {
        "static": {
            **{"target": target, "threads": 384, "registers": 168, "code_bytes": 4096},
            **{**counts, "budgets": [], "instructions": {"mma": 8}},
        },
        "simulated": {
            **{"proof_sha256": "ab" * 32, "cases": 12, "seeds": [1]},
            **{"schedules": SCHEDULES, "checked_schedules": SCHEDULES, "warp_instructions": 1000, "notes": 0},
            **{"worst_ratio": 0.4, "worst_lse_error": 0.0},
        },
        "silicon": {
            **{"date": "2026-11-29T18:00:00Z", "device": "NVIDIA H200", "driver": "580", "torch": "2.11"},
            **{"capability": target, "cases": 24, "worst_ratio": 0.4},
        },
    }
    return {**rows[level], **changes}
