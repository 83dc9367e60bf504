"""Contract of verify-rebuild.

A wheel whose inputs are those of this checkout comes out equal, byte for byte, with its evidence and its signatures.
Other inputs are told before anything is compiled; a kernel that comes out different is named, with the sections that
differ.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from fa4build import cli
from fa4build.errors import RebuildError
from fa4build.matrix.selection import Selection
from fa4build.shipping.rebuild import Rebuild, changed_inputs, differing_sections, rebuild
from fa4build.shipping.release import write_wheels
from fa4build.shipping.signing import new_key
from fa4build.shipping.wheel import write_runtime_wheel
from fa4build.store.cache import Cache
from fa4build.store.evidence import subject_of, write_record
from tests.artifacts import COMPILER_CACHE
from tests.shipping.test_release import TWO, fill, objects_of
from tests.summaries import summary

pytest.importorskip("cutlass", reason="keys name the installed compiler")


def nothing(selection: Selection, family: object) -> None:
    """A build that finds everything compiled."""


def pack_wheel(cache: Cache, out: Path, **options: object) -> Path:
    """The pack of what `fill` left in a cache."""
    (wheel,) = write_wheels(TWO, cache, out_dir=out, platforms=(), evidence_dirs=(), **options)
    return wheel.path


def test_the_same_inputs_give_the_same_wheel(tmp_path: Path) -> None:
    """Signed, and with evidence: both are taken from the wheel, as neither follows from the inputs."""
    cache = Cache(tmp_path / "cache")
    entries = fill(cache)
    write_record(cache.root, "simulated", subject_of(entries[0]), summary("simulated"))
    path = pack_wheel(cache, tmp_path / "dist", sign=new_key(tmp_path, "k")[2])
    bare = Cache(tmp_path / "again")
    fill(bare)
    result = rebuild(path, bare, nothing)

    assert result.is_reproduced, result.differences
    assert (result.num_kernels, result.num_equal, result.is_wheel_equal) == (2, 2, True)


def test_a_kernel_that_differs_is_named(tmp_path: Path) -> None:
    """The other still counts as equal; the wheel is not compared then."""
    cache = Cache(tmp_path / "cache")
    fill(cache)
    path = pack_wheel(cache, tmp_path / "dist")
    other = Cache(tmp_path / "other")
    for entry in fill(other):
        if entry.name.endswith("-full"):
            objects = objects_of(entry.name) | {"cubin": b"\x7fELF another"}
            other.put(name=entry.name, inputs=entry.inputs, facts=entry.facts, objects=objects)
    result = rebuild(path, other, nothing)

    assert (result.num_kernels, result.num_equal, result.is_wheel_equal) == (2, 1, None)
    assert [d.what for d in result.differences] == ["fwd-sm90a-bf16-hd128-full"]
    assert "its cubin differs in" in result.differences[0].reason


def test_what_does_not_compile_again_is_named(tmp_path: Path) -> None:
    """Nothing in the cache after the build."""
    cache = Cache(tmp_path / "cache")
    fill(cache)
    result = rebuild(pack_wheel(cache, tmp_path / "dist"), Cache(tmp_path / "empty"), nothing)

    assert [d.reason for d in result.differences] == ["did not compile"] * 2


def test_other_inputs_are_told_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolchain of another version: which distribution, which version there, which here."""
    cache = Cache(tmp_path / "cache")
    fill(cache)
    path = pack_wheel(cache, tmp_path / "dist")
    assert changed_inputs(path) == ()
    from fa4build.shipping import rebuild as module

    real = module.current_toolchain()
    first = dataclasses.replace(real.distributions[0], version="9.9.9")
    newer = dataclasses.replace(real, distributions=(first, *real.distributions[1:]))
    monkeypatch.setattr(module, "current_toolchain", lambda: newer)

    def never(selection: Selection, family: object) -> None:
        pytest.fail("compiled")

    with pytest.raises(RebuildError, match=rf"2 of its 2 kernels have other inputs here(?s:.*){first.name} .*9\.9\.9"):
        rebuild(path, cache, never)


def test_a_runtime_wheel_is_rebuilt_from_its_sources(tmp_path: Path) -> None:
    """With the packs that its extras name, split ones among them."""
    parts = {"sm90a": ("fa4-kernels-sm90a-bwd", "fa4-kernels-sm90a-fwd")}
    cache = Cache(tmp_path / "cache")
    cache.root.mkdir()
    written = write_runtime_wheel("x86_64", tmp_path, compiler_cache=COMPILER_CACHE, parts=parts)
    (cache.root / "zig").symlink_to(COMPILER_CACHE)
    result = rebuild(written.path, cache, nothing)

    assert result.is_reproduced, result.differences
    assert result == Rebuild(
        wheel=written.path.name, sha256=written.sha256, num_kernels=0, num_equal=0, is_wheel_equal=True, differences=()
    )


def test_sections_that_differ_are_named() -> None:
    """What is no ELF file has none."""
    assert differing_sections(b"\x7fELF", b"\x7fELF!") == ["its ELF structure"]


@pytest.mark.dsl
def test_the_command_compiles_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One real kernel, compiled twice by the compiler, with two caches: equal bytes, exit code 0."""
    cache = ["--cache-dir", str(tmp_path / "cache"), "--jobs", "1"]
    selection = ["--select", "fwd-sm90a-bf16-hd64-full", "--no-runtime", "--out", str(tmp_path / "dist")]
    with pytest.raises(SystemExit) as ended:
        cli.main(["wheel", *selection, *cache, "--allow-spills"])
    assert ended.value.code == 0, capsys.readouterr().err
    (path,) = (tmp_path / "dist").iterdir()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify-rebuild", str(path), "--jobs", "1", "--json"])
    result = json.loads(capsys.readouterr().out)

    assert ended.value.code == 0
    assert (result["num_kernels"], result["num_equal"], result["is_wheel_equal"]) == (1, 1, True)
