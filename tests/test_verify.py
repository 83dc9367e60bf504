"""Contract of fa4build.verify.

Evidence belongs to what was checked: what passes is written for the cubin's digest, what fails withdraws it. A record
from a GPU is kept whole or not at all, and only if every cubin in it is the one that is cached here.
"""

import json
from pathlib import Path

import pytest

from fa4build.cache import Cache
from fa4build.codegen.compile import CompileOptions
from fa4build.errors import Fa4BuildError, NotCachedError, NothingSelectedError, SimulationError, VariantError
from fa4build.evidence import read_record, silicon_records, write_record
from fa4build.pipeline import recipe_for
from fa4build.toolchain import current_toolchain
from fa4build.variants import Selection, expand_matrix, parse_variant
from fa4build.verify import Check, Options, VerifyReport, built_variants, install_record, verify

pytest.importorskip("cutlass", reason="keys name the installed compiler")

NAMES = ("fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full")


def fill(cache: Cache) -> dict[str, str]:
    """Two entries as a build would leave them, with made-up cubins; id -> digest of the cubin."""
    digests = {}
    for name in NAMES:
        recipe = recipe_for(parse_variant(name), current_toolchain(), CompileOptions())
        facts = {"target": "sm_90a", "ptxas": "V13.1.80", "symbols": [], "registers": 168}
        facts |= {"spill_bytes": 0, "local_bytes": 0, "shared_bytes": 200000}
        objects = {"cubin": b"\x7fELF " + name.encode(), "plan": b"{}", "ptx": b"", "log": b""}
        entry = cache.put(name=name, inputs=recipe.inputs, facts=facts, objects=objects)
        digests[name] = entry.objects["cubin"].sha256
    return digests


def record_of(digests: dict[str, str], **changes: object) -> dict:
    """A run on a GPU in which everything passed."""
    rows = [
        {"id": name, "cubin_sha256": digest, "passed": True, "cases": 40, "worst_ratio": 0.3, "failures": []}
        for name, digest in digests.items()
    ]
    run = {"schema": 1, "date": "2026-11-29T18:00:00Z", "device": "NVIDIA H200", "capability": "sm_90a"}
    return {**run, "driver": "580.95", "torch": "2.11.0", "variants": rows, **changes}


def written(path: Path, record: dict) -> Path:
    """The record as a file."""
    path.write_text(json.dumps(record))
    return path


# --- selection --------------------------------------------------------------------------------------------------------


def test_globs_take_what_is_written_and_skip_what_is_not():
    """`fwd-sm90a-*` also matches kernels with cap and sink, which nobody has written."""
    chosen = [variant.id for variant in built_variants((), ("fwd-sm90a-*",))]

    assert set(chosen) == {v.id for v in expand_matrix(Selection(arches=("sm90a",))) if v.op == "fwd"}
    assert [v.id for v in built_variants(("sm90",), ("fwd-*-bf16-hd128-full", "fwd-*-bf16-hd128-causal"))] == [
        "fwd-sm90a-bf16-hd128-full",
        "fwd-sm90a-bf16-hd128-causal",
    ]


def test_a_variant_outside_the_default_matrix_is_taken_by_its_name():
    """Built by those who name it, proven by those who name it."""
    outside = "fwd-sm90a-bf16-hd256-full-paged-sink"
    assert outside not in {v.id for v in expand_matrix(Selection(arches=("sm90a",)))}
    assert [v.id for v in built_variants((), (outside,))] == [outside]


def test_a_glob_that_takes_nothing_says_why():
    """Nothing near; an id that cannot be."""
    with pytest.raises(NothingSelectedError, match=r"matches no variant\. Nearest:"):
        built_variants((), ("fwd-sm80-*",))
    with pytest.raises(VariantError):
        built_variants((), ("fwd-sm90a-bf16-hd100-full",))


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_what_is_not_compiled_is_named(tmp_path):
    """Nothing is compiled on the way."""
    with pytest.raises(NotCachedError, match=NAMES[0]):
        verify([parse_variant(NAMES[0])], Cache(tmp_path), Options(simulate=False))


def test_a_failed_check_withdraws_older_evidence_and_stops_no_other(tmp_path):
    """Made-up bytes are no cubin: both fail, each is told, the exit code is that of a failed proof."""
    cache = Cache(tmp_path)
    digests = fill(cache)
    write_record(cache.root, "static", digests[NAMES[0]], {"registers": 168})
    events = []
    report = verify([parse_variant(name) for name in NAMES], cache, Options(simulate=False), events.append)

    assert [(check.name, check.status) for check in report.checks] == [(name, "failed") for name in NAMES]
    assert read_record(cache.root, "static", digests[NAMES[0]]) is None
    assert report.exit_code == 10
    assert [(event.done, event.total) for event in events] == [(1, 2), (2, 2)]


def test_what_nobody_has_written_cases_for_is_told_and_proves_nothing(tmp_path, monkeypatch):
    """No process is started, no evidence written; where nothing else was proven, the exit code says so."""
    monkeypatch.setattr("fa4build.verify.has_cases", lambda variant: False)
    cache = Cache(tmp_path)
    name = "bwd_preprocess-sm90a-bf16-hd64"
    recipe = recipe_for(parse_variant(name), current_toolchain(), CompileOptions())
    objects = {"cubin": b"\x7fELF", "plan": b"{}", "ptx": b"", "log": b""}
    entry = cache.put(name=name, inputs=recipe.inputs, facts={"registers": 168}, objects=objects)
    report = verify([parse_variant(name)], cache, Options(static=False))

    assert [(check.level, check.status) for check in report.checks] == [("simulated", "unproven")]
    assert "no acceptance cases for bwd_preprocess" in report.checks[0].notes[0]
    assert report.exit_code == 10
    assert read_record(cache.root, "simulated", entry.objects["cubin"].sha256) is None


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [
        (("unproven", "passed"), 0),
        (("unproven", "known"), 0),
        (("unproven", "unproven"), 10),
        (("passed", "failed"), 10),
    ],
)
def test_one_kernel_proven_is_a_proof_of_something(statuses, exit_code):
    """Kernels without cases do no harm beside one that has passed, now or before."""
    checks = tuple(Check(name=str(n), level="simulated", status=s, seconds=0.0) for n, s in enumerate(statuses))

    assert VerifyReport(checks=checks, digests={}, seconds=0.0).exit_code == exit_code


# --- records from GPUs ------------------------------------------------------------------------------------------------


def test_a_record_that_matches_is_kept_under_its_target_device_and_date(tmp_path):
    """And counts as evidence from then on."""
    cache = Cache(tmp_path / "cache")
    digests = fill(cache)
    kept = install_record(written(tmp_path / "r.json", record_of(digests)), cache, tmp_path / "evidence")

    assert kept.path == tmp_path / "evidence/sm90a/nvidia-h200-20261129T180000Z.json"
    assert kept.proven == NAMES
    assert "fwd-sm90a-bf16-hd64-full" in kept.missing
    assert silicon_records([tmp_path / "evidence"])[digests[NAMES[0]]]["device"] == "NVIDIA H200"


def test_a_record_of_another_cubin_is_refused(tmp_path):
    """One digest differs: nothing is kept."""
    cache = Cache(tmp_path / "cache")
    record = record_of({**fill(cache), NAMES[1]: "ab" * 32})

    with pytest.raises(SimulationError, match=f"{NAMES[1]}: ran as cubin abababababababab, here it is"):
        install_record(written(tmp_path / "r.json", record), cache, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


def test_a_record_with_a_failure_is_refused(tmp_path):
    """The failure is told."""
    cache = Cache(tmp_path / "cache")
    record = record_of(fill(cache))
    record["variants"][0] |= {"passed": False, "failures": [{"case": "odd", "faults": ["out is off by 1"]}]}

    with pytest.raises(SimulationError, match=r"failed on NVIDIA H200.*out is off by 1"):
        install_record(written(tmp_path / "r.json", record), cache, tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        pytest.param({"schema": 2}, "schema 2", id="newer schema"),
        pytest.param({"something": 1}, "not a device record", id="another file"),
        pytest.param(record_of({}), "holds no variant", id="nothing ran"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, record, said):
    """Before anything is looked up."""
    with pytest.raises(Fa4BuildError, match=said):
        install_record(written(tmp_path / "r.json", record), Cache(tmp_path / "cache"), tmp_path / "evidence")
