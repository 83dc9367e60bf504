"""Small made-up artifacts for tests of packs and wheels: right in form, not runnable on any GPU."""

import dataclasses
import hashlib
import os
import tempfile
from pathlib import Path

from fa4build.runtime.fa4_kernels.evidence import RECORD_FIELD, record_digest
from fa4build.shipping.manifest import Facts
from fa4build.shipping.pack import Artifact
from fa4build.store.evidence import Evidence
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan
from tests.summaries import summary

ABI = "ab" * 32
COMPILER_CACHE = Path(tempfile.gettempdir()) / f"fa4build-tests-zig-{os.getuid()}"
COMPILER_CACHE.mkdir(exist_ok=True)  # some tests link to it, whichever comes first
"""Shared by all tests that build the launcher and do not ask whether a fresh cache gives the same."""

TOOLCHAIN = {"nvidia-cutlass-dsl": "4.8.1", "ptxas": "13.1.80"}


def made_up_artifact(
    *, head_dim: int = 128, mask: str = "causal", dtype: str = "bf16", target: str = "sm_90a"
) -> Artifact:
    """One variant with 1,000 to 2,000 bytes that differ by variant but repeat a common part."""
    variant_id = f"fwd-{target.replace('_', '')}-{dtype}-hd{head_dim}-{mask}"
    seed = hashlib.sha256(variant_id.encode()).hexdigest()
    code = b"shared code of the family" * 40 + seed.encode() * (head_dim // 16)
    facts = Facts(
        id=variant_id,
        op="fwd",
        target=target,
        axes={
            "dtype": dtype,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "mask": mask,
            "layout": "dense",
            "split": False,
        },
        symbols=(f"{variant_id.replace('-', '_')}_0",),
        registers=168,
        spill_bytes=0,
        shared_bytes=200000,
        source_sha256=hashlib.sha256(b"source" + code).hexdigest(),
        key=hashlib.sha256(b"key" + code).hexdigest(),
        tuning={"tile_m": 128, "tile_n": 128},
    )
    return with_code(facts, code)


def with_code(facts: Facts, code: bytes) -> Artifact:
    """The artifact of these facts, with `code` as machine code; symbols follow from the id, other facts are kept."""
    symbol = f"{facts.id.replace('-', '_')}_0"
    entry = MadeUpEntry(registers=facts.registers, local_bytes=facts.spill_bytes)
    cubin = made_up_cubin({symbol: entry}, target=facts.target, code=code)
    plan = made_up_plan(cubin, [symbol], smem=facts.shared_bytes, spec={"head_dim": facts.axes.get("head_dim")})
    return Artifact(facts=dataclasses.replace(facts, symbols=(symbol,)), cubin=cubin, plan=plan)


def proven(artifact: Artifact, *levels: str) -> Artifact:
    """The artifact with evidence of these levels, sealed for it."""
    facts, digests = artifact.facts, [hashlib.sha256(data).hexdigest() for data in (artifact.cubin, artifact.plan)]
    rows = {level: summary(level, facts.target) for level in levels}
    sealed = {
        level: {**row, RECORD_FIELD: record_digest(level, facts.id, *digests, row)} for level, row in rows.items()
    }
    return dataclasses.replace(artifact, facts=dataclasses.replace(facts, evidence=Evidence(**sealed)))


def made_up_family(count: int) -> list[Artifact]:
    """`count` variants that differ in head_dim alone."""
    return [made_up_artifact(head_dim=16 * (i + 1)) for i in range(count)]
