"""Contract of evidence.

It is tied to bytes: a record counts for the cubin, launch plan and PTX that it names, of the kernel that it names, and
only in the form that `verify` writes: every field, each within its range, of every acceptance case under every
schedule. Anything else counts for nothing and is told in one line. What is committed is checked alike.
"""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from fa4build.cases.acceptance_set import acceptance_cases
from fa4build.cases.schedules import runs_of
from fa4build.errors import Fa4BuildError
from fa4build.shipping.release import committed_evidence
from fa4build.store.evidence import (
    Committed,
    Evidence,
    EvidenceWarning,
    Subject,
    committed_in,
    evidence_for,
    known_records,
    level_fault,
    read_record,
    read_simulated,
    record_path,
    silicon_records,
    simulated_records,
    write_record,
    write_simulated,
)
from tests.summaries import summary

SHA = "ab" * 32
KERNEL = "fwd-sm90a-bf16-hd128-causal"
SUBJECT = Subject(kernel=KERNEL, cubin_sha256=SHA, plan_sha256="cd" * 32, ptx_sha256="ef" * 32)
SIMULATED, STATIC = summary("simulated"), summary("static")


def _run(date, passed=True, ratio=0.5):
    row = {"id": KERNEL, "cubin_sha256": SHA, "cases": 40, "worst_ratio": ratio, "passed": passed}
    run = {"schema": 1, "date": f"{date}T00:00:00Z", "device": "H200", "driver": "580", "torch": "2.11"}
    return {**run, "capability": "sm_90a", "variants": [row]}


def test_a_record_reads_back_as_written(tmp_path):
    """Write, then read: the same summary, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for level, row in (("simulated", SIMULATED), ("static", STATIC)):
            write_record(tmp_path, level, SUBJECT, row)
            assert read_record(tmp_path, level, SUBJECT) == row
        assert read_record(tmp_path, "static", dataclasses.replace(SUBJECT, cubin_sha256="12" * 32)) is None


@pytest.mark.parametrize("field", ["kernel", "plan_sha256", "ptx_sha256"])
def test_a_record_of_another_compile_does_not_count(tmp_path, field):
    """The same cubin under another id, with another plan, from other PTX."""
    write_record(tmp_path, "static", SUBJECT, STATIC)
    with pytest.warns(EvidenceWarning, match="of another compile of"):
        assert read_record(tmp_path, "static", dataclasses.replace(SUBJECT, **{field: "98" * 32})) is None


def test_a_record_of_another_cubin_does_not_count(tmp_path):
    """A file renamed to another digest is not believed."""
    write_record(tmp_path, "static", SUBJECT, STATIC)
    other = record_path(tmp_path, "static", "cd" * 32)
    record_path(tmp_path, "static", SHA).rename(other)

    with pytest.warns(EvidenceWarning, match="it is of cubin abababab"):
        assert read_record(tmp_path, "static", dataclasses.replace(SUBJECT, cubin_sha256="cd" * 32)) is None


def test_a_damaged_record_counts_as_none(tmp_path):
    """Cut in the middle."""
    path = write_record(tmp_path, "static", SUBJECT, STATIC)
    path.write_bytes(path.read_bytes()[:20])

    with pytest.warns(EvidenceWarning, match="no record that `verify` wrote"):
        assert read_record(tmp_path, "static", SUBJECT) is None


FORGED = {
    "by hand": {"schema": 1, "cubin_sha256": SHA, "summary": {"made": "up"}},
    "older schema": {"schema": 1},
    "schema is a float": {"schema": 2.0},
    "other level": {"level": "silicon"},
    "made up": {"summary": {"made": "up"}},
    "no summary": {"summary": None},
    "a case less": {"summary": {**SIMULATED, "cases": 11}},
    "cases is true": {"summary": {**SIMULATED, "cases": True}},
    "failed": {"summary": {**SIMULATED, "worst_ratio": 1.01}},
    "NaN": {"summary": {**SIMULATED, "worst_ratio": float("nan")}},
    "no seed": {"summary": {**SIMULATED, "seeds": []}},
    "one schedule": {"summary": {**SIMULATED, "schedules": ["eager"]}},
    "nothing checked": {"summary": {**SIMULATED, "checked_schedules": ["eager"]}},
    "no proof": {"summary": {**SIMULATED, "proof_sha256": "short"}},
    "no proof at all": {"summary": {name: x for name, x in SIMULATED.items() if name != "proof_sha256"}},
    "unknown field": {"summary": {**SIMULATED, "trust": "me"}},
    "other cases": {"cases": ["single"]},
    "other digest": {"record": "0" * 64},
    "signed": {"signatures": ["ed25519 .."]},
    "more than that": {"more": 1},
}


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED)
def test_what_verify_did_not_write_is_no_evidence(tmp_path, changes):
    """One line says so; neither a look-up nor the list of what is known has it."""
    path = write_record(tmp_path, "simulated", SUBJECT, SIMULATED)
    document = changes if "cubin_sha256" in changes else {**json.loads(path.read_bytes()), **changes}
    path.write_text(json.dumps(document))

    with pytest.warns(EvidenceWarning, match="counts for nothing") as told:
        assert read_record(tmp_path, "simulated", SUBJECT) is None
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    with pytest.warns(EvidenceWarning):
        assert known_records(tmp_path, "simulated") == {}


def test_what_is_committed_here_passes_every_check():
    """Every row that the project ships, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        committed = committed_in(committed_evidence())

    assert len(committed.simulated) > 500
    assert len(committed.silicon) > 300


@pytest.mark.parametrize(
    ("run", "row"),
    [
        ({"capability": "sm_100a"}, {}),
        ({"device": ""}, {}),
        ({"date": "yesterday"}, {}),
        ({}, {"cases": 0}),
        ({}, {"worst_ratio": 1.2}),
        ({}, {"passed": 1}),
        ({}, {"cubin_sha256": "x"}),
        ({}, {"id": "fwd"}),
        ({}, {"failures": ["case 3"]}),
    ],
)
def test_a_run_that_no_gpu_can_have_made_is_an_error(tmp_path, run, row):
    """Another GPU than the kernel is for, no device, no date, nothing run, over the bound, a digest that is none."""
    record = {**_run("2026-11-02"), **run}
    record["variants"][0] |= row
    (tmp_path / "a.json").write_text(json.dumps(record))

    with pytest.raises(Fa4BuildError, match=r"a\.json: not a device record"):
        silicon_records([tmp_path])


def test_acceptance_cases_are_those_of_the_variant():
    """12 of a dense causal forward, 6 more with windows; none is known of another family's kernel."""
    assert len(acceptance_cases(KERNEL)) == 12
    assert len(acceptance_cases("fwd-sm90a-bf16-hd128-local")) == 18
    assert acceptance_cases("scale_rows-sm90a-n256") == ()


def test_the_newest_run_on_silicon_counts(tmp_path):
    """Two runs of one cubin."""
    (tmp_path / "b.json").write_text(json.dumps(_run("2026-11-01", ratio=0.9)))
    (tmp_path / "a.json").write_text(json.dumps(_run("2026-11-02", ratio=0.4)))

    assert silicon_records([tmp_path])[SHA]["worst_ratio"] == 0.4


def test_a_failed_variant_leaves_no_evidence(tmp_path):
    """passed = false."""
    (tmp_path / "a.json").write_text(json.dumps(_run("2026-11-02", passed=False)))

    assert silicon_records([tmp_path]) == {}


def test_a_foreign_file_among_the_records_is_an_error(tmp_path):
    """Silence would hide a lost record."""
    (tmp_path / "a.json").write_text('{"something": 1}')

    with pytest.raises(Fa4BuildError, match=r"a\.json: not a device record"):
        silicon_records([tmp_path])


def test_level_is_the_highest_passed(tmp_path):
    """silicon > simulated > static > none."""
    assert Evidence().level == "none"
    assert Evidence(static={}, simulated={}).level == "simulated"
    assert evidence_for(SUBJECT, tmp_path, Committed(silicon={SHA: summary("silicon")})).level == "silicon"


def test_simulated_proofs_read_back_as_committed(tmp_path):
    """Shared fields are written once and given back to every kernel; a line a kernel, in the order of ids."""
    rows = {
        "fwd-sm90a-bf16-hd64-local": (SHA, {**SIMULATED, "cases": 18}),
        KERNEL: ("cd" * 32, SIMULATED),
    }
    write_simulated(tmp_path / "sm90a" / "simulated.json", rows)

    assert read_simulated(tmp_path / "sm90a" / "simulated.json") == rows
    assert simulated_records([tmp_path]) == dict(rows.values())
    lines = (tmp_path / "sm90a" / "simulated.json").read_text().splitlines()
    assert [line[1:26] for line in lines if line.startswith('"fwd')] == [KERNEL[:25], "fwd-sm90a-bf16-hd64-local"]
    assert sum('"eager"' in line for line in lines) == 1
    assert silicon_records([tmp_path]) == {}


def test_a_committed_row_that_is_no_evidence_is_told_and_left_out(tmp_path):
    """The others count."""
    path: Path = tmp_path / "simulated.json"
    write_simulated(path, {KERNEL: (SHA, SIMULATED), "fwd-sm90a-bf16-hd64-full": ("cd" * 32, {"cases": 12})})
    with pytest.warns(EvidenceWarning, match="fwd-sm90a-bf16-hd64-full: lacks checked_schedules"):
        assert simulated_records([tmp_path]) == {SHA: SIMULATED}


def test_many_committed_rows_that_are_no_evidence_are_told_in_one_line(tmp_path):
    """The first, and how many more: acceptance sets grow, and then all of an op fall behind."""
    names = [f"fwd-sm90a-bf16-hd64-{mask}" for mask in ("causal", "full", "local")]
    write_simulated(tmp_path / "simulated.json", {name: (SHA, {**SIMULATED, "cases": 1}) for name in names})
    with pytest.warns(EvidenceWarning) as told:
        assert simulated_records([tmp_path]) == {}

    (line,) = (str(each.message) for each in told)
    assert "fwd-sm90a-bf16-hd64-causal: is of 1 cases" in line
    assert line.endswith("Nor do 2 more of its records.")


def test_a_native_record_comes_before_one_of_the_python_engine(tmp_path):
    """Wherever either lies; an engine that nobody knows is none."""
    runs = [run.schedule for run in runs_of("native")]
    native = {**SIMULATED, "engine": "native", "schedules": runs, "checked_schedules": runs}
    committed = Committed(simulated={SHA: native})
    write_record(tmp_path, "simulated", SUBJECT, SIMULATED)
    assert evidence_for(SUBJECT, tmp_path, committed).simulated["engine"] == "native"
    write_record(tmp_path, "simulated", SUBJECT, {**native, "worst_ratio": 0.5})
    assert evidence_for(SUBJECT, tmp_path, committed).simulated["worst_ratio"] == 0.5

    assert "engine" in level_fault("simulated", KERNEL, {**native, "engine": "another"})
    assert "schedules" in level_fault("simulated", KERNEL, {**native, "engine": "python"})


def test_a_damaged_file_of_proofs_is_an_error(tmp_path):
    """Cut in the middle: nobody should take it for an empty one."""
    path = tmp_path / "simulated.json"
    write_simulated(path, {"fwd-a": (SHA, {"cases": 12})})
    path.write_bytes(path.read_bytes()[:40])

    with pytest.raises(Fa4BuildError, match=r"simulated\.json: not a record of simulated proofs"):
        simulated_records([tmp_path])


def test_what_was_simulated_here_comes_before_what_was_committed(tmp_path):
    """And what was committed counts where nothing was simulated; a failed kernel has neither."""
    committed = Committed(simulated={SHA: SIMULATED})
    assert evidence_for(SUBJECT, tmp_path, committed).simulated["seeds"] == [1]

    write_record(tmp_path, "simulated", SUBJECT, {**SIMULATED, "seeds": [1, 2]})
    assert evidence_for(SUBJECT, tmp_path, committed).simulated["seeds"] == [1, 2]
    assert known_records(tmp_path, "simulated") == {SHA: {**SIMULATED, "seeds": [1, 2]}}
