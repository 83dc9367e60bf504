"""Contract of fa4build.shipping.pack.

Same variants, same bytes, in whatever order they come. A pack reads back to the same artifacts. Payload and manifest
are equal both ways: no file too few or too many. No byte is used before its digest matched; any flipped byte is found.
"""

import dataclasses
import hashlib
import lzma
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import WheelError
from fa4build.shipping.pack import Artifact, Pack, build_pack, pack_from_files, read_pack, unpack, write_pack
from tests.artifacts import ABI, TOOLCHAIN, made_up_artifact, made_up_family


def packed(artifacts: list[Artifact]) -> Pack:
    """A pack of these."""
    return build_pack(artifacts, pack="fa4-kernels-sm90a", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN)


def test_artifacts_come_back() -> None:
    """Every fact and every byte survives, over more than one group."""
    artifacts = made_up_family(70)

    assert sorted(artifacts, key=lambda a: a.facts.id) == sorted(unpack(packed(artifacts)), key=lambda a: a.facts.id)


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(min_size=1, max_size=50)), min_size=1, max_size=9)
)
@settings(max_examples=50, deadline=None)
def test_any_bytes_come_back(blobs: list[tuple[bytes, bytes]]) -> None:
    """Cubins and plans are opaque to a pack: whatever they hold, equal ones and single bytes among them."""
    named = zip(made_up_family(len(blobs)), blobs, strict=True)
    artifacts = [dataclasses.replace(artifact, cubin=cubin, plan=plan) for artifact, (cubin, plan) in named]
    files = packed(artifacts).files()

    assert sorted(unpack(pack_from_files(files, origin="p")), key=lambda a: a.facts.id) == sorted(
        artifacts, key=lambda a: a.facts.id
    )


def test_order_of_building_does_not_matter() -> None:
    """Shuffled artifacts give the same files."""
    artifacts = made_up_family(70)
    shuffled = artifacts.copy()
    random.Random(1).shuffle(shuffled)

    assert packed(artifacts).files() == packed(shuffled).files()


def test_group_is_cubins_then_plans() -> None:
    """The layout of the format page: offsets count in the decompressed group, cubins first."""
    pack = packed([made_up_artifact(mask="causal"), made_up_artifact(mask="full")])
    raw = lzma.decompress(pack.groups["group-000.xz"])
    first, second = pack.manifest.entries

    assert raw == b"".join(a.cubin for a in unpack(pack)) + b"".join(a.plan for a in unpack(pack))
    assert first.cubin.offset == 0
    assert second.cubin.offset == first.cubin.size
    assert first.plan.offset == first.cubin.size + second.cubin.size
    assert hashlib.sha256(raw[: first.cubin.size]).hexdigest() == first.cubin.sha256


def test_variants_that_differ_in_a_word_share_a_group() -> None:
    """Numbers sort first: the 64 head_dims of two masks are 128 entries, and a head_dim's two masks stay together."""
    artifacts = [made_up_artifact(head_dim=16 * (i + 1), mask=mask) for mask in ("causal", "full") for i in range(64)]
    pack = packed(artifacts)
    groups = {entry.id: entry.cubin.group for entry in pack.manifest.entries}

    assert all(
        groups[f"fwd-sm90a-bf16-hd{d}-causal"] == groups[f"fwd-sm90a-bf16-hd{d}-full"] for d in range(16, 1025, 16)
    )


def test_directory_round_trip(tmp_path: Path) -> None:
    """What was written reads back, and holds exactly the files of the format page."""
    pack = packed(made_up_family(3))
    directory = write_pack(pack, tmp_path)

    assert directory == tmp_path / "fa4_kernels_sm90a"
    assert sorted(p.name for p in directory.iterdir()) == ["__init__.py", "group-000.xz", "manifest.json", "seal.txt"]
    assert read_pack(directory) == pack


def test_missing_group_is_refused() -> None:
    """Manifest without payload."""
    files = packed(made_up_family(2)).files()
    del files["group-000.xz"]

    with pytest.raises(WheelError, match=r"group-000\.xz: missing"):
        pack_from_files(files, origin="p")


def test_groups_end_at_64_entries_or_at_4_mib() -> None:
    """130 small kernels: 64, 64, 2. Five of 1.5 MiB each: two a group, as a third would be over 4 MiB."""
    small = packed(made_up_family(130)).manifest
    big = [dataclasses.replace(artifact, cubin=artifact.cubin.ljust(3 << 19, b"\0")) for artifact in made_up_family(5)]
    sizes = [
        [sum(entry.cubin.group == number for entry in manifest.entries) for number in range(len(manifest.groups))]
        for manifest in (small, packed(big).manifest)
    ]

    assert sizes == [[64, 64, 2], [2, 2, 1]]


def test_extra_file_is_refused() -> None:
    """Payload without manifest."""
    files = {**packed(made_up_family(2)).files(), "group-001.xz": b"x"}

    with pytest.raises(WheelError, match=r"group-001\.xz: not in the manifest"):
        pack_from_files(files, origin="p")


def test_code_in_init_is_refused() -> None:
    """A pack holds data only."""
    files = {**packed(made_up_family(2)).files(), "__init__.py": b"import os\n"}

    with pytest.raises(WheelError, match=r"__init__.py is not the one fa4build writes"):
        pack_from_files(files, origin="p")


def test_no_manifest_is_no_pack(tmp_path: Path) -> None:
    """An arbitrary directory."""
    with pytest.raises(WheelError, match="this is no pack"):
        read_pack(tmp_path)


def flipped(data: bytes, position: int) -> bytes:
    """The data with one bit of one byte turned over."""
    return data[:position] + bytes([data[position] ^ (1 << (position % 8))]) + data[position + 1 :]


@pytest.mark.parametrize("name", ["group-000.xz", "__init__.py"])
def test_every_flipped_byte_of_the_payload_is_found(name: str) -> None:
    """Every byte of the files that a manifest speaks for."""
    files = packed([made_up_artifact(head_dim=16)]).files()
    for position in range(len(files[name])):
        with pytest.raises(WheelError):
            pack_from_files({**files, name: flipped(files[name], position)}, origin="p")


def test_flipped_byte_of_the_manifest_never_gives_other_kernels() -> None:
    """Facts such as a register count have no digest inside a pack (the wheel's RECORD has one); kernel bytes do."""
    pack = packed([made_up_artifact(head_dim=16)])
    files = pack.files()
    expected = {(a.cubin, a.plan) for a in unpack(pack)}
    refused = 0
    for position in range(len(files["manifest.json"])):
        try:
            read = pack_from_files({**files, "manifest.json": flipped(files["manifest.json"], position)}, origin="p")
        except WheelError:
            refused += 1
        else:
            assert {(a.cubin, a.plan) for a in unpack(read)} == expected

    assert refused > 500  # every structural byte and every digest of the payload: 4 x 64 characters and the syntax


def test_truncated_group_is_refused() -> None:
    """Half a group."""
    files = packed(made_up_family(2)).files()
    files["group-000.xz"] = files["group-000.xz"][: len(files["group-000.xz"]) // 2]

    with pytest.raises(WheelError, match=r"group-000.xz: .*damaged"):
        pack_from_files(files, origin="p")


def with_group(pack: Pack, data: bytes) -> Pack:
    """The pack with its group replaced and the manifest's digest of it made to fit, as a forger would."""
    group = dataclasses.replace(pack.manifest.groups[0], sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    return Pack(manifest=dataclasses.replace(pack.manifest, groups=(group,)), groups={group.file: data})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda raw: lzma.compress(raw + b"\0" * (100 << 20)), id="bomb"),
        pytest.param(lambda raw: lzma.compress(raw[:-1]), id="short"),
        pytest.param(lambda raw: lzma.compress(raw) + b"tail", id="tail"),
    ],
)
def test_group_must_be_as_long_as_the_manifest_says(make) -> None:
    """A forged group with a right digest: it is decompressed to one byte past the promised size at most."""
    pack = packed(made_up_family(2))
    forged = with_group(pack, make(lzma.decompress(pack.groups["group-000.xz"])))

    with pytest.raises(WheelError, match="other than the"):
        list(unpack(forged))


def test_group_that_is_no_xz_is_refused() -> None:
    """Right digest, wrong format."""
    with pytest.raises(WheelError, match="not an xz stream"):
        list(unpack(with_group(packed(made_up_family(2)), b"no xz at all")))


def test_swapped_blob_is_found() -> None:
    """A forged group whose bytes are those of another kernel: the blob's own digest catches it."""
    pack = packed(made_up_family(2))
    raw = bytearray(lzma.decompress(pack.groups["group-000.xz"]))
    raw[5] ^= 0xFF

    with pytest.raises(WheelError, match="cubin of fwd-sm90a-bf16-hd16-causal: sha256"):
        list(unpack(with_group(pack, lzma.compress(bytes(raw)))))


def test_standard_library_reads_groups() -> None:
    """The runtime needs nothing but lzma.decompress, in less than 16 MiB."""
    pack = packed(made_up_family(2))
    raw = lzma.decompress(pack.groups["group-000.xz"], memlimit=16 << 20)

    assert len(raw) == pack.manifest.groups[0].raw_size
