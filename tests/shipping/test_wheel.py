"""Contract of fa4build.shipping.wheel and fa4build.shipping.wheel_file.

A wheel is a pure function of its contents: fixed times, order, modes; RECORD complete and right; name from METADATA.
It appears whole or not at all, and is left alone when its inputs did not change. Reading accepts only what was written:
a truncated file, a flipped byte anywhere, a renamed file, a foreign wheel are one WheelError each.
"""

import base64
import dataclasses
import email.parser
import hashlib
import json
import os
import stat
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from fa4build import __version__
from fa4build.errors import WheelError
from fa4build.matrix.arch import arch_named
from fa4build.runtime import fa4_kernels
from fa4build.shipping.pack import Artifact, read_pack, unpack
from fa4build.shipping.wheel import WrittenWheel, license_text, runtime_extras, write_pack_wheel
from fa4build.shipping.wheel_file import Metadata, WheelSource, read_wheel, wheel_bytes, write_wheel
from tests.artifacts import TOOLCHAIN, made_up_artifact, made_up_family

SM90 = arch_named("sm90")


def small_source(**changes: object) -> WheelSource:
    """A wheel of two files."""
    metadata = Metadata(
        name="Some.thing-small", version="1.2", summary="s", description="# d\n", license_expression="Apache-2.0"
    )
    values = {
        "metadata": metadata,
        "tag": "py3-none-any",
        "is_pure": True,
        "files": {"pkg/b.py": b"b = 1\n", "pkg/a.bin": bytes(range(256))},
        "licenses": {"LICENSE": b"text\n"},
        "sboms": {"s.cdx.json": b"{}\n"},
    }
    return WheelSource(**{**values, **changes})


def pack_wheel(out_dir: Path, artifacts: list[Artifact] | None = None) -> WrittenWheel:
    """A pack wheel of three made-up variants, or of these."""
    return write_pack_wheel(artifacts or made_up_family(3), arch=SM90, toolchain=TOOLCHAIN, out_dir=out_dir)


def installed(wheel: Path, site: Path) -> Distribution:
    """The distribution as Python's own metadata reader sees it after unpacking, which is what installing does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return PathDistribution(next(site.glob("*.dist-info")))


def test_members_are_in_fixed_order_with_fixed_times_and_modes() -> None:
    """Files by name, then dist-info by name, RECORD last; 1980-01-01, mode 0644, stored."""
    import io

    with zipfile.ZipFile(io.BytesIO(wheel_bytes(small_source()))) as archive:
        entries = archive.infolist()

    assert [entry.filename for entry in entries] == [
        "pkg/a.bin",
        "pkg/b.py",
        "some_thing_small-1.2.dist-info/METADATA",
        "some_thing_small-1.2.dist-info/WHEEL",
        "some_thing_small-1.2.dist-info/licenses/LICENSE",
        "some_thing_small-1.2.dist-info/sboms/s.cdx.json",
        "some_thing_small-1.2.dist-info/RECORD",
    ]
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.external_attr >> 16 for entry in entries} == {stat.S_IFREG | 0o644}
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}


def test_record_hashes_match(tmp_path: Path) -> None:
    """Each row's digest and size, computed here from the unpacked file; RECORD names itself without either."""
    distribution = installed(write_wheel(small_source(), tmp_path), tmp_path / "site")
    rows = {str(file): (file.hash, file.size) for file in distribution.files}

    assert rows.pop("some_thing_small-1.2.dist-info/RECORD") == (None, None)
    assert len(rows) == 6
    for name, (digest, size) in rows.items():
        data = (tmp_path / "site" / name).read_bytes()
        assert digest.mode == "sha256"
        assert digest.value == base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert size == len(data)


def test_order_of_files_given_does_not_matter() -> None:
    """Dictionaries in another order give the same bytes."""
    source = small_source()
    reordered = dataclasses.replace(source, files=dict(reversed(source.files.items())))

    assert wheel_bytes(source) == wheel_bytes(reordered)


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "ä.py", "a b.py", "x.dist-info/METADATA", "x.data/a"])
def test_unsafe_paths_are_refused(name: str) -> None:
    """Nothing that could leave site-packages or overwrite metadata."""
    with pytest.raises(WheelError):
        wheel_bytes(small_source(files={name: b""}))


def test_pack_wheel_name_parses_back_to_its_tags(tmp_path: Path) -> None:
    """The file name is that of the metadata."""
    wheel = pack_wheel(tmp_path)
    name, version, _, tags = parse_wheel_filename(wheel.path.name)

    assert wheel.path.name == "fa4_kernels_sm90a-0.1.0-py3-none-any.whl"
    assert (name, str(version), {str(tag) for tag in tags}) == ("fa4-kernels-sm90a", "0.1.0", {"py3-none-any"})


def test_pack_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Group `fa4_kernels.packs`: name = pack, value = import package; and that package reads as the pack."""
    artifacts = made_up_family(3)
    distribution = installed(pack_wheel(tmp_path, artifacts).path, tmp_path / "site")
    (point,) = distribution.entry_points

    assert (point.group, point.name, point.value) == ("fa4_kernels.packs", "fa4-kernels-sm90a", "fa4_kernels_sm90a")
    unpacked = unpack(read_pack(tmp_path / "site" / point.value))
    assert sorted(a.facts.id for a in unpacked) == sorted(a.facts.id for a in artifacts)


def test_pack_wheel_metadata(tmp_path: Path) -> None:
    """A pack requires nothing, says its licence and lists its kernels."""
    distribution = installed(pack_wheel(tmp_path).path, tmp_path / "site")
    metadata = distribution.metadata

    assert metadata["Name"] == "fa4-kernels-sm90a"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert distribution.requires is None
    assert "- `fwd-sm90a-bf16-hd16-causal`: none\n" in metadata.get_payload()
    assert "Apache License" in distribution.read_text("licenses/LICENSE")


def test_runtime_extras_name_one_pack_a_target() -> None:
    """`fa4-kernels[sm90]` pulls in that pack, `all` every one."""
    assert runtime_extras() == {
        "sm90": ("fa4-kernels-sm90a",),
        "sm100": ("fa4-kernels-sm100a",),
        "sm103": ("fa4-kernels-sm103a",),
        "all": ("fa4-kernels-sm100a", "fa4-kernels-sm103a", "fa4-kernels-sm90a"),
    }


def test_extras_reach_metadata() -> None:
    """Requirements of extras carry the marker; plain ones do not."""
    metadata = dataclasses.replace(
        small_source().metadata, requires=("torch>=2.6",), extras={"sm90": ("fa4-kernels-sm90a",)}
    )
    data = wheel_bytes(small_source(metadata=metadata))
    start = data.index(b"Metadata-Version")
    message = email.parser.BytesParser().parsebytes(data[start:], headersonly=True)

    assert message.get_all("Requires-Dist") == ["torch>=2.6", 'fa4-kernels-sm90a; extra == "sm90"']
    assert message.get_all("Provides-Extra") == ["sm90"]


def test_versions_of_builder_and_runtime_are_one() -> None:
    """The wheel's version is fa4build's; the runtime inside must report the same."""
    assert fa4_kernels.__version__ == __version__


def test_sbom_lists_sources_and_toolchain(tmp_path: Path) -> None:
    """CycloneDX at the place PEP 770 names: each source with its digest, each compiler with its version."""
    artifact = dataclasses.replace(made_up_artifact(), dependencies=(("kernels_src/softmax/online.py", "cd" * 32),))
    distribution = installed(pack_wheel(tmp_path, [artifact]).path, tmp_path / "site")
    sbom = json.loads(distribution.read_text("sboms/fa4build.cdx.json"))
    parts = {part["name"]: part["hashes"][0]["content"] for part in sbom["components"]}
    tools = {tool["name"]: tool["version"] for tool in sbom["metadata"]["tools"]["components"]}

    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert parts == {
        "kernels_src/softmax/online.py": "cd" * 32,
        "rendered/fwd-sm90a-bf16-hd128-causal.py": artifact.facts.source_sha256,
        "licenses/LICENSE": hashlib.sha256(license_text()).hexdigest(),
    }
    assert tools == {"fa4build": __version__, "nvidia-cutlass-dsl": "4.8.1", "ptxas": "13.1.80"}
    assert sbom["metadata"]["component"]["purl"] == "pkg:pypi/fa4-kernels-sm90a@0.1.0"


def test_one_source_in_two_versions_is_refused(tmp_path: Path) -> None:
    """Kernels built from two states of the tree make no pack."""
    artifacts = [
        dataclasses.replace(artifact, dependencies=(("kernels_src/a.py", digest * 32),))
        for artifact, digest in zip(made_up_family(2), ("aa", "bb"), strict=True)
    ]

    with pytest.raises(WheelError, match="different versions of one source"):
        pack_wheel(tmp_path, artifacts)


def test_wheel_is_written_once(tmp_path: Path) -> None:
    """Unchanged inputs: not even touched. A changed artifact: written anew."""
    first = pack_wheel(tmp_path)
    stamp = first.path.stat().st_mtime_ns
    again = pack_wheel(tmp_path)
    unchanged = first.path.stat().st_mtime_ns == stamp
    changed = pack_wheel(tmp_path, made_up_family(4))

    assert (first.is_new, again.is_new, unchanged, changed.is_new) == (True, False, True, True)
    assert first.sha256 == again.sha256 != changed.sha256


def test_damaged_wheel_is_written_anew(tmp_path: Path) -> None:
    """A torn wheel in the output directory is no reason to keep it."""
    first = pack_wheel(tmp_path)
    first.path.write_bytes(first.path.read_bytes()[:500])

    assert pack_wheel(tmp_path) == first
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    """Over the size limit, wrong target, no artifact: an error before the output directory exists."""
    out = tmp_path / "dist"
    with pytest.raises(WheelError, match=r"the limit is 100\."):
        write_pack_wheel(made_up_family(1), arch=SM90, toolchain=TOOLCHAIN, out_dir=out, limit_bytes=100)
    with pytest.raises(WheelError, match="not for sm_90a"):
        pack_wheel(out, [made_up_artifact(target="sm_100a")])
    with pytest.raises(WheelError, match="no entries"):
        write_pack_wheel([], arch=SM90, toolchain=TOOLCHAIN, out_dir=out)

    assert not out.exists()


def test_file_mode_does_not_follow_the_umask(tmp_path: Path) -> None:
    """The wheel itself is readable by all, whoever built it."""
    previous = os.umask(0o077)
    try:
        wheel = pack_wheel(tmp_path)
    finally:
        os.umask(previous)

    assert stat.S_IMODE(wheel.path.stat().st_mode) == 0o644


def test_wheel_reads_back(tmp_path: Path) -> None:
    """Name, version, tag and every file but RECORD."""
    contents = read_wheel(write_wheel(small_source(), tmp_path))

    assert (contents.name, contents.version, contents.tag) == ("some_thing_small", "1.2", "py3-none-any")
    assert contents.files["pkg/a.bin"] == bytes(range(256))
    assert contents.sbom() == b"{}\n"
    assert len(contents.files) == 6


def test_pack_reads_back_from_its_wheel(tmp_path: Path) -> None:
    """The same artifacts as from the directory."""
    artifacts = made_up_family(3)
    pack = read_pack(pack_wheel(tmp_path, artifacts).path)

    assert sorted(artifacts, key=lambda a: a.facts.id) == sorted(unpack(pack), key=lambda a: a.facts.id)


def test_every_flipped_byte_of_a_wheel_is_found(tmp_path: Path) -> None:
    """Payload, metadata and every zip header field: one bit of each byte."""
    path = write_wheel(small_source(), tmp_path)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << (position % 8))]) + data[position + 1 :])
        with pytest.raises(WheelError):
            read_wheel(path)


def test_every_truncation_of_a_wheel_is_found(tmp_path: Path) -> None:
    """Any prefix, and any tail added."""
    path = write_wheel(small_source(), tmp_path)
    data = path.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(WheelError):
            read_wheel(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(WheelError):
        read_wheel(path)


def test_renamed_wheel_is_refused(tmp_path: Path) -> None:
    """Another name, version or tag than METADATA and WHEEL say."""
    path = write_wheel(small_source(), tmp_path)
    for name in (
        "other-1.2-py3-none-any.whl",
        "some_thing_small-1.3-py3-none-any.whl",
        "some_thing_small-1.2-cp310-abi3-any.whl",
    ):
        renamed = path.with_name(name)
        renamed.write_bytes(path.read_bytes())
        with pytest.raises(WheelError, match=r"renamed|not the name of a wheel"):
            read_wheel(renamed)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """Not a zip; a deflated wheel; a missing file; a name that is no wheel's."""
    not_zip = tmp_path / "a-1-py3-none-any.whl"
    not_zip.write_bytes(b"hello")
    deflated = tmp_path / "b-1-py3-none-any.whl"
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b.py", "b = 1\n" * 100)

    with pytest.raises(WheelError, match="not a complete zip file"):
        read_wheel(not_zip)
    with pytest.raises(WheelError, match="not stored plainly"):
        read_wheel(deflated)
    with pytest.raises(WheelError, match="cannot be read"):
        read_wheel(tmp_path / "c-1-py3-none-any.whl")
    with pytest.raises(WheelError, match="not the name of a wheel"):
        read_wheel(tmp_path / "c.txt")


def test_added_file_is_found(tmp_path: Path) -> None:
    """A member that RECORD does not list."""
    path = write_wheel(small_source(), tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pkg/evil.py", "evil = 1\n")

    with pytest.raises(WheelError, match=r"RECORD disagrees with the contents at pkg/evil\.py"):
        read_wheel(path)
