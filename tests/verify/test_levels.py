"""Contract of fa4build.verify.levels.

Evidence belongs to what was checked: what passes is written for the cubin's digest, what fails withdraws it. A record
from a GPU is kept whole or not at all, and only if every cubin in it is the one that is cached here.
"""

import json
from pathlib import Path

import pytest

from fa4build.cases.acceptance_set import acceptance_cases, acceptance_schedules
from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import Fa4BuildError, NotCachedError, NothingSelectedError, SimulationError, VariantError
from fa4build.matrix.variants import Selection, expand_matrix, parse_variant
from fa4build.pipeline import recipe_for
from fa4build.store.cache import Cache
from fa4build.store.evidence import (
    engine_of,
    known_records,
    read_record,
    read_simulated,
    silicon_records,
    subject_of,
    write_record,
)
from fa4build.verify.levels import Check, Options, VerifyReport, built_variants, install_record, keep_simulated, verify
from fa4build.verify.pool import End
from fa4build.verify.runs import Link
from fa4build.verify.simulated import Proof
from tests.summaries import summary

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
    with pytest.raises(NothingSelectedError, match=r"matches no variant\. Did you mean 'fwd-sm90a-\*'"):
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
    fill(cache)
    subject = subject_of(next(entry for entry in cache.entries() if entry.name == NAMES[0]))
    write_record(cache.root, "static", subject, summary("static"))
    events = []
    report = verify([parse_variant(name) for name in NAMES], cache, Options(simulate=False), events.append)

    assert [(check.name, check.status) for check in report.checks] == [(name, "failed") for name in NAMES]
    assert read_record(cache.root, "static", subject) is None
    assert report.exit_code == 10
    assert [(event.done, event.total) for event in events] == [(1, 2), (2, 2)]


def test_what_nobody_has_written_cases_for_is_told_and_proves_nothing(tmp_path, monkeypatch):
    """No process is started, no evidence written; where nothing else was proven, the exit code says so."""
    monkeypatch.setattr("fa4build.verify.levels.has_cases", lambda variant: False)
    cache = Cache(tmp_path)
    name = "bwd_preprocess-sm90a-bf16-hd64"
    recipe = recipe_for(parse_variant(name), current_toolchain(), CompileOptions())
    objects = {"cubin": b"\x7fELF", "plan": b"{}", "ptx": b"", "log": b""}
    entry = cache.put(name=name, inputs=recipe.inputs, facts={"registers": 168}, objects=objects)
    report = verify([parse_variant(name)], cache, Options(static=False))

    assert [(check.level, check.status) for check in report.checks] == [("simulated", "unproven")]
    assert "no acceptance cases for bwd_preprocess" in report.checks[0].notes[0]
    assert report.exit_code == 10
    assert read_record(cache.root, "simulated", subject_of(entry)) is None


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


# --- simulated once ---------------------------------------------------------------------------------------------------


TWINS = ("bwd_preprocess-sm100a-bf16-hd64", "bwd_preprocess-sm103a-bf16-hd64")


@pytest.fixture
def simulations(monkeypatch):
    """The names of all kernels that would have been simulated; each passes, `failing` fails."""
    ran: list[str] = []

    def run(tasks, *, on_end, **_):
        for task in tasks:
            ran.append(task.name)
            engine, (schedules, checked) = task.argument.engine, acceptance_schedules(task.argument.engine)
            proof = {"proof_sha256": task.argument.sha256, "cases": len(acceptance_cases(task.name)), "engine": engine}
            proof |= {"schedules": list(schedules), "checked_schedules": list(checked)}
            passed = task.argument.proven or summary("simulated", **proof)
            if task.argument.chain:
                passed = {**passed, "chain_sha256": task.argument.chain_sha256}
            proof = Proof(summary=passed, runs=(), failures=("wrong",) if "failing" in ran else ())
            on_end(End(name=task.name, result=proof, error=None, seconds=1.0))

    monkeypatch.setattr("fa4build.verify.levels.run_tasks", run)
    return ran


def fill_twins(cache: Cache) -> dict[str, str]:
    """Kernels of both Blackwell targets whose PTX differs in the target alone."""
    digests = {}
    for name in TWINS:
        recipe = recipe_for(parse_variant(name), current_toolchain(), CompileOptions())
        ptx = f".target sm_{name.split('-')[1][2:]}".encode()
        plan = json.dumps({"origin": {"cubin_sha256": name[::-1]}, "launches": [name.split("-")[1]]}).encode()
        objects = {"cubin": b"\x7fELF " + name.encode(), "plan": plan, "ptx": ptx, "log": b""}
        entry = cache.put(name=name, inputs=recipe.inputs, facts={"registers": 28}, objects=objects)
        digests[name] = entry.objects["cubin"].sha256
    return digests


def test_equal_kernels_are_simulated_once(tmp_path, simulations):
    """Both targets in one run: one simulation, evidence for both cubins. Again: none."""
    cache = Cache(tmp_path)
    digests = fill_twins(cache)
    variants = [parse_variant(name) for name in TWINS]
    report = verify(variants, cache, Options(static=False))

    assert simulations == [TWINS[0]]
    assert [check.status for check in report.checks] == ["passed", "passed"]
    assert known_records(cache.root, "simulated").keys() == set(digests.values())
    again = verify(variants, cache, Options(static=False))
    assert simulations == [TWINS[0]]
    assert [check.status for check in again.checks] == ["known", "known"]


def test_each_engine_proves_for_itself(tmp_path, simulations):
    """What one has proven the other proves anew; a native record stays, as it shows more."""
    cache = Cache(tmp_path)
    fill_twins(cache)
    variants = [parse_variant(TWINS[0])]
    subject = subject_of(next(entry for entry in cache.entries() if entry.name == TWINS[0]))

    def proven_by(engine: str) -> str:
        verify(variants, cache, Options(static=False, engine=engine))
        return engine_of(read_record(cache.root, "simulated", subject))

    assert [proven_by(engine) for engine in ("python", "native", "python", "native")] == ["python", *["native"] * 3]
    assert len(simulations) == 3  # the last one was known


def test_a_python_record_of_the_checkout_is_evidence_until_a_native_one_takes_its_place(tmp_path, simulations):
    """One line a kernel: the native one, whatever comes later."""
    cache, evidence = Cache(tmp_path / "cache"), tmp_path / "evidence"
    digests = fill_twins(cache)
    variants = [parse_variant(TWINS[0])]

    def kept_by(engine: str) -> str:
        keep_simulated(verify(variants, cache, Options(static=False, engine=engine, fresh=True)), evidence)
        (row,) = read_simulated(evidence / "sm100a/simulated.json").values()
        assert row[0] == digests[TWINS[0]]
        return engine_of(row[1])

    assert [kept_by(engine) for engine in ("python", "native", "python")] == ["python", "native", "native"]


def test_chains_of_equal_kernels_are_known_each(tmp_path, simulations, monkeypatch):
    """The kernel is simulated once, each target's chain of other kernels once; both again: nothing."""
    chain = lambda self, variant: (Link(op="fwd", ptx=f"kernel {variant.arch[-3:-1]}", plan="", registers=1),)  # noqa: E731
    monkeypatch.setattr("fa4build.verify.levels._Run._chain", chain)
    cache = Cache(tmp_path)
    fill_twins(cache)
    variants = [parse_variant(name) for name in TWINS]
    verify(variants, cache, Options(static=False))
    assert simulations == list(TWINS)

    again = verify(variants, cache, Options(static=False))
    assert simulations == list(TWINS)
    assert [check.status for check in again.checks] == ["known", "known"]


def test_what_one_target_has_proven_another_knows_later(tmp_path, simulations):
    """In a run of its own: what differs in names alone has one proof."""
    cache = Cache(tmp_path)
    digests = fill_twins(cache)
    verify([parse_variant(TWINS[0])], cache, Options(static=False))
    report = verify([parse_variant(TWINS[1])], cache, Options(static=False))

    assert simulations == [TWINS[0]]
    assert [check.status for check in report.checks] == ["known"]
    proofs = known_records(cache.root, "simulated")
    assert proofs.keys() == set(digests.values())
    assert len({proof["proof_sha256"] for proof in proofs.values()}) == 1


def test_an_equal_kernel_fails_with_the_first(tmp_path, simulations):
    """And neither has evidence."""
    cache = Cache(tmp_path)
    digests = fill_twins(cache)
    simulations.append("failing")
    report = verify([parse_variant(name) for name in TWINS], cache, Options(static=False))

    assert [(check.name, check.status) for check in report.checks] == [(name, "failed") for name in TWINS]
    assert digests
    assert known_records(cache.root, "simulated") == {}


def test_committed_proofs_are_known_to_a_fresh_cache(tmp_path, simulations):
    """Kept from one cache, found by another that built the same kernels; what fails later is taken out."""
    first, fresh = Cache(tmp_path / "first"), Cache(tmp_path / "fresh")
    fill_twins(first)
    fill_twins(fresh)
    variants = [parse_variant(name) for name in TWINS]
    paths = keep_simulated(verify(variants, first, Options(static=False)), tmp_path / "evidence")

    assert [path.relative_to(tmp_path / "evidence").as_posix() for path in paths] == [
        "sm100a/simulated.json",
        "sm103a/simulated.json",
    ]
    known = verify(variants, fresh, Options(static=False, evidence_dirs=(tmp_path / "evidence",)))
    assert simulations == [TWINS[0]]
    assert [check.status for check in known.checks] == ["known", "known"]

    simulations.append("failing")
    keep_simulated(verify(variants, fresh, Options(static=False, fresh=True)), tmp_path / "evidence")
    assert read_simulated(paths[0]) == {}


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
