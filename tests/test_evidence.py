"""Contract: evidence is tied to the bytes of a cubin; damaged or foreign records count for nothing."""

import json

import pytest

from fa4build.errors import Fa4BuildError
from fa4build.evidence import (
    Committed,
    Evidence,
    evidence_for,
    known_records,
    read_record,
    read_simulated,
    record_path,
    silicon_records,
    simulated_records,
    write_record,
    write_simulated,
)

SHA = "ab" * 32


def _run(date, passed=True, ratio=0.5):
    row = {"id": "fwd-x", "cubin_sha256": SHA, "cases": 40, "worst_ratio": ratio, "passed": passed}
    return {"schema": 1, "date": date, "device": "H200", "driver": "580", "torch": "2.11", "variants": [row]}


def test_a_record_reads_back_as_written(tmp_path):
    """Write, then read: the same summary."""
    write_record(tmp_path, "simulated", SHA, {"cases": 12})

    assert read_record(tmp_path, "simulated", SHA) == {"cases": 12}


def test_a_record_of_another_cubin_does_not_count(tmp_path):
    """A file renamed to another digest is not believed."""
    write_record(tmp_path, "static", SHA, {})
    other = record_path(tmp_path, "static", "cd" * 32)
    record_path(tmp_path, "static", SHA).rename(other)

    assert read_record(tmp_path, "static", "cd" * 32) is None


def test_a_damaged_record_counts_as_none(tmp_path):
    """Cut in the middle."""
    path = write_record(tmp_path, "static", SHA, {"registers": 168})
    path.write_bytes(path.read_bytes()[:20])

    assert read_record(tmp_path, "static", SHA) is None


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
    assert evidence_for(SHA, tmp_path, Committed(silicon={SHA: {"cases": 1}})).level == "silicon"


def test_simulated_proofs_read_back_as_committed(tmp_path):
    """Shared fields are written once and given back to every kernel; a line a kernel, in the order of ids."""
    rows = {
        "fwd-b": (SHA, {"schedules": ["eager"], "cases": 12}),
        "fwd-a": ("cd" * 32, {"schedules": ["eager"], "cases": 13}),
    }
    write_simulated(tmp_path / "sm90a" / "simulated.json", rows)

    assert read_simulated(tmp_path / "sm90a" / "simulated.json") == rows
    assert simulated_records([tmp_path]) == dict(rows.values())
    lines = (tmp_path / "sm90a" / "simulated.json").read_text().splitlines()
    assert [line[:7] for line in lines if line.startswith('"fwd')] == ['"fwd-a"', '"fwd-b"']
    assert sum("eager" in line for line in lines) == 1
    assert silicon_records([tmp_path]) == {}


def test_a_damaged_file_of_proofs_is_an_error(tmp_path):
    """Cut in the middle: nobody should take it for an empty one."""
    path = tmp_path / "simulated.json"
    write_simulated(path, {"fwd-a": (SHA, {"cases": 12})})
    path.write_bytes(path.read_bytes()[:40])

    with pytest.raises(Fa4BuildError, match=r"simulated\.json: not a record of simulated proofs"):
        simulated_records([tmp_path])


def test_what_was_simulated_here_comes_before_what_was_committed(tmp_path):
    """And what was committed counts where nothing was simulated; a failed kernel has neither."""
    committed = Committed(simulated={SHA: {"cases": 12}})
    assert evidence_for(SHA, tmp_path, committed).simulated == {"cases": 12}

    write_record(tmp_path, "simulated", SHA, {"cases": 13})
    assert evidence_for(SHA, tmp_path, committed).simulated == {"cases": 13}
    assert known_records(tmp_path, "simulated") == {SHA: {"cases": 13}}
