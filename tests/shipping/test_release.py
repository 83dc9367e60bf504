"""Contract of fa4build.shipping.release.

Cached compiles become one pack wheel a target and one runtime wheel a host. Facts come from the cache entry, evidence
only from records of the very cubin. Everything is prepared before anything is written: what is missing, spills or does
not fit is an error that leaves the output directory as it was.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import NotCachedError, WheelError
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import Selection, expand_matrix
from fa4build.pipeline import recipe_for
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.shipping.pack import read_pack, unpack
from fa4build.shipping.release import artifact_of, toolchain_of, write_wheels
from fa4build.shipping.wheel_file import read_wheel
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import Committed, subject_of, write_record
from tests.artifacts import COMPILER_CACHE
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan
from tests.summaries import summary

pytest.importorskip("cutlass", reason="keys name the installed compiler")

TWO = Selection(globs=("fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full"))


def fill(cache: Cache, selection: Selection = TWO, **facts: object) -> list[CacheEntry]:
    """Entries as a build would leave them, with made-up cubins: this file is not about compiling."""
    entries = []
    for variant in expand_matrix(selection):
        recipe = recipe_for(variant, current_toolchain(), CompileOptions())
        known = {"target": "sm_90a", "ptxas": "V13.1.80", "symbols": [f"{variant.symbol}_0"], "registers": 168}
        known |= {"spill_bytes": 0, "local_bytes": 0, "shared_bytes": 200000, **facts}
        objects = objects_of(variant.id, local_bytes=known["spill_bytes"])
        entries.append(cache.put(name=variant.id, inputs=recipe.inputs, facts=known, objects=objects))
    return entries


def objects_of(name: str, **entry: int) -> dict[str, bytes]:
    """What a compile leaves: a made-up cubin, its plan, and texts that nobody reads here."""
    symbol = f"{name.replace('-', '_')}_0"
    cubin = made_up_cubin({symbol: MadeUpEntry(**entry)}, code=name.encode() * 50)
    return {"cubin": cubin, "plan": made_up_plan(cubin, [symbol]), "ptx": b"", "log": b""}


def packs_only(cache: Cache, out_dir: Path, **options: object) -> Path:
    """The pack wheel of the two variants."""
    (wheel,) = write_wheels(TWO, cache, out_dir=out_dir, platforms=(), **{"evidence_dirs": (), **options})
    return wheel.path


def test_pack_holds_what_the_cache_holds(tmp_path: Path) -> None:
    """Ids, bytes and facts; axes without op and arch, which have fields of their own; every tuning field."""
    cache = Cache(tmp_path / "cache")
    entries = {entry.name: entry for entry in fill(cache)}
    pack = read_pack(packs_only(cache, tmp_path / "dist"))
    artifacts = {artifact.facts.id: artifact for artifact in unpack(pack)}
    causal = artifacts["fwd-sm90a-bf16-hd128-causal"]
    entry = entries["fwd-sm90a-bf16-hd128-causal"]

    assert sorted(artifacts) == ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full"]
    assert causal.cubin == objects_of("fwd-sm90a-bf16-hd128-causal")["cubin"]
    assert (causal.facts.op, causal.facts.target, causal.facts.key) == ("fwd", "sm_90a", entry.key)
    assert causal.facts.axes == {
        "dtype": "bf16",
        "head_dim": 128,
        "head_dim_v": 128,
        "mask": "causal",
        "layout": "dense",
        "split": False,
        "cta_group": 1,
        "deterministic": False,
        "softcap": False,
        "sink": False,
    }
    (variant,) = expand_matrix(Selection(globs=("fwd-sm90a-bf16-hd128-causal",)))
    assert set(causal.facts.tuning) == {field.name for field in dataclasses.fields(tuning_for(variant))}
    assert pack.manifest.abi == ABI_HASH
    assert pack.manifest.toolchain["nvidia-cutlass-dsl"] == "4.8.1"
    assert pack.manifest.toolchain["ptxas"] == "V13.1.80"


def test_missing_variants_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    """One of two in the cache."""
    cache = Cache(tmp_path / "cache")
    fill(cache, Selection(globs=("fwd-sm90a-bf16-hd128-full",)))

    with pytest.raises(NotCachedError, match="fwd-sm90a-bf16-hd128-causal"):
        packs_only(cache, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_kernels_are_not_shipped_without_those_they_are_launched_with(tmp_path: Path) -> None:
    """A selection that takes them alone is refused by name, before anything is looked up."""
    alone = Selection(globs=("fwd-sm90a-bf16-hd64-causal-paged-split", "bwd-sm90a-bf16-hd64-full"), alone=True)

    with pytest.raises(WheelError, match=r"could not be called: fwd-.*-split needs fwd_combine-sm90a-bf16-hd64; bwd-"):
        write_wheels(alone, Cache(tmp_path / "cache"), out_dir=tmp_path / "dist", platforms=(), evidence_dirs=())
    assert not (tmp_path / "dist").exists()


def test_unknown_platform_writes_nothing(tmp_path: Path) -> None:
    """It is named after the pack could have been made, and still nothing is there."""
    cache = Cache(tmp_path / "cache")
    fill(cache)

    with pytest.raises(WheelError, match="platform 'sparc' is unknown"):
        write_wheels(TWO, cache, out_dir=tmp_path / "dist", platforms=("sparc",), evidence_dirs=())
    with pytest.raises(WheelError, match="the limit is 10"):
        packs_only(cache, tmp_path / "dist", limit_bytes=10)
    assert not (tmp_path / "dist").exists()


def test_spills_are_shipped_knowingly_or_not_at_all(tmp_path: Path) -> None:
    """Refused with names and bytes; accepted when asked for, and then stated in the manifest."""
    cache = Cache(tmp_path / "cache")
    fill(cache, spill_bytes=16)

    with pytest.raises(WheelError, match=r"fwd-sm90a-bf16-hd128-full \(16 bytes\)"):
        packs_only(cache, tmp_path / "dist")
    pack = read_pack(packs_only(cache, tmp_path / "dist", allow_spills=True))
    assert {entry.facts.spill_bytes for entry in pack.manifest.entries} == {16}


def test_evidence_belongs_to_the_cubin(tmp_path: Path) -> None:
    """A record for one cubin's sha256 reaches its entry and no other; new evidence makes a new wheel."""
    cache = Cache(tmp_path / "cache")
    entries = sorted(fill(cache), key=lambda entry: entry.name)
    before = packs_only(cache, tmp_path / "dist").read_bytes()
    causal = hashlib.sha256(objects_of("fwd-sm90a-bf16-hd128-causal")["cubin"]).hexdigest()
    write_record(cache.root, "simulated", subject_of(entries[0]), summary("simulated"))
    record = {
        "schema": 1,
        "date": "2026-11-29T18:00:00Z",
        "capability": "sm_90a",
        "device": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11",
        "variants": [{"id": TWO.globs[0], "cubin_sha256": causal, "passed": True, "cases": 40, "worst_ratio": 0.2}],
    }
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "run.json").write_text(json.dumps(record))
    path = packs_only(cache, tmp_path / "dist", evidence_dirs=(tmp_path / "evidence", tmp_path / "none"))
    levels = {entry.id: entry.evidence_level for entry in read_pack(path).manifest.entries}

    assert levels == {"fwd-sm90a-bf16-hd128-causal": "silicon", "fwd-sm90a-bf16-hd128-full": "none"}
    assert path.read_bytes() != before


@pytest.mark.filterwarnings("ignore::fa4build.store.cache.CacheCorruptWarning")
def test_damaged_cache_is_never_packed(tmp_path: Path) -> None:
    """A flipped byte in a stored cubin: the entry counts as missing."""
    cache = Cache(tmp_path / "cache")
    entry = fill(cache)[0]
    digest = entry.objects["cubin"].sha256
    path = next((cache.root / "objects").rglob(digest))
    path.chmod(0o644)
    path.write_bytes(b"X" + path.read_bytes()[1:])

    with pytest.raises(NotCachedError):
        packs_only(cache, tmp_path / "dist")


def test_one_toolchain_a_pack(tmp_path: Path) -> None:
    """Entries of two assemblers do not go into one pack."""
    cache = Cache(tmp_path / "cache")
    entries = fill(cache)
    other = dataclasses.replace(entries[1], facts={**entries[1].facts, "ptxas": "V12.0.0"})

    with pytest.raises(WheelError, match="Build all with one toolchain"):
        toolchain_of([entries[0], other])


def test_dependencies_reach_the_artifact(tmp_path: Path) -> None:
    """The kernel sources, with digests, for the SBOM."""
    cache = Cache(tmp_path / "cache")
    artifact = artifact_of(fill(cache)[0], cache, Committed())

    assert "kernels_src/forward/sm90.py" in dict(artifact.dependencies)
    assert all(len(sha256) == 64 for _, sha256 in artifact.dependencies)


def test_a_single_file_holds_runtime_and_packs(tmp_path: Path) -> None:
    """The same files as the separate wheels, one entry point a pack, one SBOM a part, and a name of its own."""
    cache = Cache(tmp_path / "cache")
    fill(cache)
    (cache.root / "zig").symlink_to(COMPILER_CACHE)
    options = {"platforms": ("aarch64",), "evidence_dirs": ()}
    separate = [read_wheel(w.path) for w in write_wheels(TWO, cache, out_dir=tmp_path / "dist", **options)]
    (single,) = write_wheels(TWO, cache, out_dir=tmp_path / "single", single_file=True, **options)
    wheel = read_wheel(single.path)
    installed = {name: data for name, data in wheel.files.items() if ".dist-info/" not in name}

    assert single.path.name == "fa4_kernels_single-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl"
    assert installed == {n: data for w in separate for n, data in w.files.items() if ".dist-info/" not in n}
    assert wheel.files[f"{wheel.dist_info}/entry_points.txt"] == (
        b"[fa4_kernels.packs]\nfa4-kernels-sm90a = fa4_kernels_sm90a\n"
    )
    assert {n for n in wheel.files if "/sboms/" in n} == {
        f"{wheel.dist_info}/sboms/{name}.cdx.json" for name in ("fa4_kernels", "fa4_kernels_sm90a")
    }
