"""Contract of the doctor.

Each subject is checked by itself, so all problems show at once; a problem says what to do. Looking changes nothing.
"""

from pathlib import Path

import pytest

from fa4build import doctor
from fa4build.doctor import Check, examine
from fa4build.errors import ToolchainError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the two checks that read the whole compiler."""
    for name in ("_toolchain_files", "_compiler_starts"):
        monkeypatch.setattr(doctor, name, lambda name=name: Check(subject=name, status="ok", found="left out"))


def by_subject(cache_dir: Path, environ: dict[str, str] | None = None) -> dict[str, Check]:
    """The checks by what they are about."""
    return {check.subject: check for check in examine(cache_dir, environ or {})}


@pytest.mark.usefixtures("quick")
def test_a_machine_that_can_build_passes_every_check(tmp_path):
    """Also when the cache directory is not there yet; it is not made."""
    checks = by_subject(tmp_path / "not" / "there")

    assert {check.status for check in checks.values()} <= {"ok", "warning"}
    assert "not created yet" in checks["cache directory"].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_one_problem_does_not_hide_another(tmp_path, monkeypatch):
    """No compiler, a steering variable and a file in the way of the cache: three failures, each with its next step."""

    def missing() -> None:
        raise ToolchainError("nvidia-cutlass-dsl is not installed. Run: pip install it")

    monkeypatch.setattr(doctor, "current_toolchain", missing)
    (tmp_path / "file").write_text("")
    checks = by_subject(tmp_path / "file" / "cache", {"CUTE_DSL_ARCH": "sm_80"})
    failed = {subject: check.found for subject, check in checks.items() if check.status == "failed"}

    assert set(failed) == {"toolchain", "environment", "cache directory"}
    assert "pip install" in failed["toolchain"]
    assert "unset CUTE_DSL_ARCH" in failed["environment"]
    assert "--cache-dir" in failed["cache directory"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("free_bytes", "status"), [(doctor.MIN_FREE_BYTES, "ok"), (doctor.MIN_FREE_BYTES - 1, "warning")]
)
def test_little_disk_space_is_a_warning(tmp_path, monkeypatch, free_bytes, status):
    """A build may still fit."""
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free_bytes}))

    assert by_subject(tmp_path)["disk space"].status == status


@pytest.mark.usefixtures("quick")
def test_little_memory_is_a_warning(tmp_path, monkeypatch):
    """Builds work, with fewer compiles at a time than there are cores."""
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(doctor, "worker_count", lambda: 2)

    check = by_subject(tmp_path)["workers"]
    assert check.status == "warning"
    assert "2 compiles at a time: 64 cores" in check.found


def test_edited_files_of_the_compiler_are_a_failure(tmp_path, monkeypatch):
    """The key names what was installed; another file would make it lie."""
    monkeypatch.setattr(doctor, "_compiler_starts", lambda: Check(subject="compiler starts", status="ok", found=""))
    monkeypatch.setattr(doctor, "damaged_files", lambda name: ("cutlass/x.py",) if name.endswith("core") else ())

    check = by_subject(tmp_path)["toolchain files"]
    assert check.status == "failed"
    assert "1 differ from what was installed, e.g. cutlass/x.py" in check.found
    assert "--force-reinstall" in check.found
