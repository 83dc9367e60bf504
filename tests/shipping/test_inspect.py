"""Contract of fa4build.shipping.inspect.

The kind of a file follows from its contents. What is reported has been proven: a truncated file, a flipped byte,
something else altogether are one WheelError each, which says what to do. Nothing is written.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from fa4build.errors import WheelError
from fa4build.matrix.arch import arch_named
from fa4build.shipping.inspect import inspect_file
from fa4build.shipping.launcher_build import PLATFORMS, build_launcher, launcher_sources
from fa4build.shipping.pack import build_pack, write_pack
from fa4build.shipping.wheel import RUNTIME_DIR, write_pack_wheel, write_runtime_wheel
from fa4build.store.evidence import Evidence
from tests.artifacts import ABI, COMPILER_CACHE, TOOLCHAIN, made_up_family, proven

PLAN = {
    "format": "fa4build.launchplan",
    "version": 1,
    "origin": {"kind": "handwritten", "dsl": "4.8.1", "arch": "sm_90a", "ir_sha256": "", "cubin_sha256": ""},
    "spec": {"head_dim": 128},
    "args": [{"name": "n", "kind": "scalar", "dtype": "i32"}],
    "nodes": [["const", "i32", 1], ["in", "i32", "n"]],
    "guards": [],
    "launches": [
        {
            "kernel": "toy_0",
            "grid": [0, 0, 0],
            "block": [128, 1, 1],
            "cluster": [1, 1, 1],
            "smem": 1024,
            "pdl": False,
            "cooperative": False,
            "params": [{"kind": "bytes", "size": 4, "align": 4, "fields": [[0, 1]]}],
        }
    ],
    "vectors": [],
}


@pytest.fixture
def pack_wheel(tmp_path: Path) -> Path:
    """A pack wheel of two kernels: one was proven on silicon, of the other that is claimed without a record."""
    first, second = made_up_family(2)
    claims = dataclasses.replace(second.facts, evidence=Evidence(silicon={"device": "H200"}))
    second = dataclasses.replace(second, facts=claims)
    wheel = write_pack_wheel(
        [proven(first, "static", "silicon"), second], arch=arch_named("sm90"), toolchain=TOOLCHAIN, out_dir=tmp_path
    )
    return wheel.path


def test_pack_wheel(pack_wheel: Path) -> None:
    """Wheel facts, pack facts, one row a kernel."""
    report = inspect_file(pack_wheel)

    assert report.kind == "pack wheel"
    assert report.facts["tag"] == "py3-none-any"
    assert report.facts["distribution"] == report.facts["pack"] == "fa4-kernels-sm90a"
    assert report.facts["targets"] == ["sm_90a"]
    assert report.facts["abi_is_ours"] is True
    assert report.facts["size"] == pack_wheel.stat().st_size
    assert report.facts["files"] == 10  # package: 4; dist-info: METADATA WHEEL RECORD entry_points LICENSE sbom
    assert [row["id"] for row in report.rows] == ["fwd-sm90a-bf16-hd16-causal", "fwd-sm90a-bf16-hd32-causal"]
    assert [row["evidence"] for row in report.rows] == ["silicon", "claimed"]


def test_pack_directory_and_manifest(tmp_path: Path) -> None:
    """A pack of another ABI is shown and said to be of another."""
    pack = build_pack(made_up_family(2), pack="p", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN)
    directory = write_pack(pack, tmp_path)
    whole, index = inspect_file(directory), inspect_file(directory / "manifest.json")

    assert (whole.kind, index.kind) == ("pack", "manifest")
    assert whole.rows == index.rows
    assert whole.facts["abi_is_ours"] is False


def test_runtime_wheel(tmp_path: Path) -> None:
    """Its launcher is checked again, and its platform is the tag's."""
    wheel = write_runtime_wheel("aarch64", tmp_path, compiler_cache=COMPILER_CACHE)
    report = inspect_file(wheel.path)

    assert report.kind == "runtime wheel"
    assert report.facts["tag"] == "cp310-abi3-manylinux_2_28_aarch64"
    assert report.facts["platform"] == "manylinux_2_28_aarch64"
    assert {"fa4_kernels/_launcher.abi3.so", "fa4_kernels/__init__.py"} <= {row["file"] for row in report.rows}


def test_launcher(tmp_path: Path) -> None:
    """A launcher outside a wheel."""
    path = tmp_path / "lib.so"
    path.write_bytes(build_launcher(launcher_sources(RUNTIME_DIR), PLATFORMS[0], compiler_cache=COMPILER_CACHE))

    assert inspect_file(path).facts["platform"] == "manylinux_2_28_x86_64"


def test_launch_plan(tmp_path: Path) -> None:
    """One row a launch."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN, sort_keys=True))
    report = inspect_file(path)

    assert report.kind == "launch plan"
    assert report.facts["arguments"] == ["n"]
    assert report.rows == ({"kernel": "toy_0", "block": [128, 1, 1], "cluster": [1, 1, 1], "smem": 1024, "params": 1},)


def test_report_is_json(pack_wheel: Path) -> None:
    """Every value survives JSON, for `--json`."""
    document = inspect_file(pack_wheel).as_dict()

    assert json.loads(json.dumps(document)) == document
    assert sorted(document) == ["facts", "kind", "name", "rows"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        pytest.param("x.bin", b"hello", "nothing fa4build makes", id="text"),
        pytest.param("x.bin", b"", "nothing fa4build makes", id="empty"),
        pytest.param("x.whl", b"PK\3\4", "not the name of a wheel", id="wheel-name"),
        pytest.param("a-1-py3-none-any.whl", b"PK\3\4", "not a complete zip file", id="torn-zip"),
        pytest.param("x.json", b"{}", "no manifest", id="other-json"),
        pytest.param("x.json", b"{", "not JSON", id="torn-json"),
        pytest.param("x.json", b'{"format":"fa4build.launchplan","version":99}', "99", id="newer-plan"),
        pytest.param("x.json", b'{"format":"fa4build.launchplan"', "not JSON", id="torn-plan"),
        pytest.param("x.cubin", b"\x7fELF\2\1\1" + b"\0" * 11 + b"\xbe\0", "no complete cubin", id="torn-cubin"),
        pytest.param("x.so", b"\x7fELF\2\1\1" + b"\0" * 11 + b"\x3e\0", "no shared object", id="torn-launcher"),
        pytest.param("x.so", b"\x7fELF\2\1\1" + b"\0" * 11 + b"\x28\0", "machine 40", id="elf-for-arm32"),
    ],
)
def test_anything_else_is_one_clear_error(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    """What it is not, and nothing is written beside it."""
    path = tmp_path / name
    path.write_bytes(data)

    with pytest.raises(WheelError, match=message):
        inspect_file(path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_missing_file(tmp_path: Path) -> None:
    """Says that it cannot be read."""
    with pytest.raises(WheelError, match="cannot be read"):
        inspect_file(tmp_path / "none.whl")


def test_truncated_and_flipped_wheels(pack_wheel: Path) -> None:
    """Half a wheel; one bit in the middle of the kernels; one bit in the manifest's register count."""
    data = pack_wheel.read_bytes()
    group = data.index(b"\xfd7zXZ") + 60
    registers = data.index(b'"registers":168') + 12
    for damaged in (
        data[: len(data) // 2],
        data[:group] + bytes([data[group] ^ 1]) + data[group + 1 :],
        data[:registers] + b"9" + data[registers + 1 :],
    ):
        pack_wheel.write_bytes(damaged)
        with pytest.raises(WheelError):
            inspect_file(pack_wheel)


def test_cubin_of_another_kind_of_wheel_is_refused(tmp_path: Path) -> None:
    """A wheel of ours without pack or launcher."""
    from fa4build.shipping.wheel_file import write_wheel
    from tests.shipping.test_wheel import small_source

    with pytest.raises(WheelError, match="neither a pack nor a launcher"):
        inspect_file(write_wheel(small_source(), tmp_path))


def test_bytes_that_only_start_like_elf_are_no_cubin(tmp_path: Path) -> None:
    """Four right bytes, then text."""
    path = tmp_path / "x.cubin"
    path.write_bytes(b"\x7fELF" + b"text" * 40)

    with pytest.raises(WheelError, match="neither a cubin nor a launcher"):
        inspect_file(path)
