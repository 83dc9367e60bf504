"""Contract: a byte of a pack is used only after it was proven against the manifest, by a dispatcher of the same ABI.

A pack that cannot be used is a reason in the trace, never a crash and never half loaded.
"""

import json
import sys
from dataclasses import asdict

import pytest
from fa4_kernels import packs
from fa4_kernels.abi import ABI_HASH, SIGNATURES
from fa4_kernels.errors import PackError
from fa4_kernels.packs import Pack, PackReader, RefusedPack

from tests.runtime.fake import fake_cubin, forward_plan, write_pack, write_seal

IDS = ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-fp16-hd64-full"]


@pytest.fixture
def directory(tmp_path):
    return write_pack(tmp_path / "pack", IDS)


def opened(directory):
    pack = packs.open_pack("test", directory)
    assert isinstance(pack, Pack), pack
    return pack


def test_blobs_come_out_as_they_went_in(directory):
    """Cubin and plan of each entry, from one group."""
    pack, reader = opened(directory), PackReader()
    for entry in pack.manifest.entries:
        cubin, plan = reader.read(pack, entry)

        assert cubin == fake_cubin(**{entry.symbols[0]: (128, 40)})
        assert json.loads(plan)["launches"][0]["kernel"] == entry.symbols[0]


def set_in(document, path, value):
    *way, last = path
    for step in way:
        document = document[step]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        pytest.param(["schema"], 2, "schema 2, this fa4-kernels reads 1 to 1; upgrade", id="newer schema"),
        pytest.param(["schema"], "1", "schema '1'", id="schema as text"),
        pytest.param(
            ["abi"], "0" * 64, f"made for ABI 000000000000, this fa4-kernels has {ABI_HASH[:12]}", id="other ABI"
        ),
        pytest.param(["entries", 0, "cubin", "group"], 1, "group 1 of 1", id="group out of range"),
        pytest.param(["entries", 0, "cubin", "group"], -1, "group -1 of 1", id="negative group"),
        pytest.param(["entries", 0, "plan", "size"], 1 << 40, "of its group", id="past the end of the group"),
        pytest.param(["entries", 1, "cubin", "offset"], -5, "bytes -5", id="negative offset"),
        pytest.param(["groups", 0, "file"], "../group-000.xz", "'../group-000.xz'", id="file outside the pack"),
        pytest.param(["groups", 0, "raw_size"], 1 << 40, "of 1099511627776 bytes", id="group of a terabyte"),
        pytest.param(["entries", 0, "axes"], None, "damaged", id="no axes"),
        pytest.param(["groups"], "none", "damaged", id="groups as text"),
    ],
)
def test_a_manifest_outside_the_contract_is_refused_with_its_reason(tmp_path, path, value, reason):
    """One field a row."""
    directory = write_pack(tmp_path / "pack", IDS, change=lambda document: set_in(document, path, value))
    pack = packs.open_pack("test", directory)

    assert isinstance(pack, RefusedPack)
    assert reason in pack.reason


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"x"', b'{"schema"', b"\xff\xfe"])
def test_a_damaged_manifest_is_refused(directory, text):
    """Truncated, of another form, or no text at all."""
    (directory / "manifest.json").write_bytes(text)
    pack = packs.open_pack("test", directory)

    assert isinstance(pack, RefusedPack)
    assert "its manifest is damaged" in pack.reason


def test_a_missing_manifest_is_refused(directory):
    """A package without the file."""
    (directory / "manifest.json").unlink()

    assert "cannot be read" in packs.open_pack("test", directory).reason


def test_a_flipped_byte_in_a_group_is_found(directory):
    """Every position: first, middle and last byte of the stored group."""
    path = directory / "group-000.xz"
    stored = path.read_bytes()
    pack = opened(directory)
    for place in (0, len(stored) // 2, len(stored) - 1):
        damaged = bytearray(stored)
        damaged[place] ^= 1
        path.write_bytes(damaged)

        with pytest.raises(
            PackError, match=r"group-000\.xz differs from the manifest's size or sha256\. Nothing was loaded"
        ):
            PackReader().read(pack, pack.manifest.entries[0])


def test_a_missing_group_is_an_error(directory):
    """The manifest is there, its data is not."""
    pack = opened(directory)
    (directory / "group-000.xz").unlink()

    with pytest.raises(PackError, match=r"group-000\.xz cannot be read"):
        PackReader().read(pack, pack.manifest.entries[0])


def test_a_blob_is_proven_even_if_its_group_is(tmp_path):
    """A manifest whose group hash was made to fit still states the hash of each blob."""
    path = ["entries", 0, "cubin", "sha256"]
    directory = write_pack(tmp_path / "pack", IDS, change=lambda document: set_in(document, path, "0" * 64))
    pack = opened(directory)

    with pytest.raises(PackError, match="fwd-sm90a-bf16-hd128-causal: bytes of its group differ"):
        PackReader().read(pack, pack.manifest.entries[0])


def test_a_group_larger_than_promised_is_not_decompressed(tmp_path):
    """The decoder stops one byte past the promised size."""
    path = ["groups", 0, "raw_size"]
    directory = write_pack(tmp_path / "pack", IDS)
    size = json.loads((directory / "manifest.json").read_text())["groups"][0]["raw_size"]
    write_pack(directory, IDS, change=lambda document: set_in(document, path, size - 1) or document["entries"].pop())
    pack = opened(directory)

    with pytest.raises(PackError, match=f"holds {size} bytes, the manifest says {size - 1}"):
        PackReader().read(pack, pack.manifest.entries[0])


def test_packs_are_found_by_entry_point(tmp_path, monkeypatch):
    """An installed distribution announces its package; a second, broken one does not hide it."""
    site = tmp_path / "site"
    write_pack(site / "fa4_kernels_good", IDS)
    for name in ("good", "broken"):
        info = site / f"fa4_kernels_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fa4-kernels-{name}\nVersion: 0.1.0\n")
        point = f"[fa4_kernels.packs]\nfa4-kernels-{name} = fa4_kernels_{name}\n"
        (info / "entry_points.txt").write_text(point)
    monkeypatch.syspath_prepend(str(site))

    broken, good = packs.installed_packs()

    assert (broken.name, good.manifest.pack) == ("fa4-kernels-broken", "fa4-kernels-test")
    assert "fa4_kernels_broken cannot be imported" in broken.reason
    assert isinstance(good, Pack)
    sys.modules.pop("fa4_kernels_good", None)


def test_signatures_are_those_of_the_builder():
    """abi.py states what fa4build.compiling.signature gives for every dtype: names, order, types, shapes, alignment."""
    from fa4build.compiling.signature import ScalarArg, signature_for
    from fa4build.matrix.variants import parse_variant

    operators = {
        "fwd-sm90a-bf16-hd192x128-causal": "fwd/dense",
        "fwd-sm90a-fp16-hd64-full": "fwd/dense",
        "fwd-sm100a-e4m3-hd128-full": "fwd/dense/fp8",
        "fwd-sm90a-bf16-hd128-full-paged-split-softcap": "fwd/paged/softcap/split",
        "bwd-sm90a-bf16-hd128-full-varlen": "bwd/varlen",
        "fwd_combine-sm90a-bf16-hd128-sink": "fwd_combine/dense/sink",
    }
    for variant_id, operator in operators.items():
        variant = parse_variant(variant_id)
        words = {"variant": variant.dtype, "output": "bf16" if variant.dtype == "e4m3" else variant.dtype}
        extents = {"head_dim": variant.head_dim, "head_dim_v": variant.head_dim_v}
        expected = []
        for name, kind, dtype, *rest in SIGNATURES[operator]:
            shape = tuple(extents.get(extent, extent) for extent in rest[0]) if rest else None
            expected.append((name, kind, words.get(dtype, dtype), shape, rest[1] if rest else None))
        actual = [
            (a.name, "scalar", a.dtype, None, None)
            if isinstance(a, ScalarArg)
            else (a.name, "tensor", a.dtype, a.shape, a.align_bytes)
            for a in signature_for(variant)
        ]

        assert actual == expected


def test_packs_of_the_builder_are_read(tmp_path):
    """fa4build writes a pack from real variants; every entry is found by dispatch and its plan is accepted."""
    from fa4_kernels.dispatch import Device, Problem, dispatch
    from fa4_kernels.loader import bound_plan
    from fa4_kernels.plan import encode_plan, parse_plan

    from fa4build.matrix.variants import parse_variant
    from fa4build.shipping.manifest import Facts
    from fa4build.shipping.pack import Artifact, build_pack
    from fa4build.shipping.pack import write_pack as write_builder_pack

    artifacts = []
    for name in (*IDS, "fwd-sm90a-bf16-hd192x128-local"):
        variant = parse_variant(name)
        numbers = {"registers": 168, "spill_bytes": 0, "shared_bytes": 0, "source_sha256": "a" * 64, "key": "b" * 64}
        facts = Facts(
            id=name, op=variant.op, target="sm_90a", axes=asdict(variant), symbols=(variant.symbol + "_0",), **numbers
        )
        document = forward_plan(variant.symbol + "_0", {"bf16": "bf16", "fp16": "f16"}[variant.dtype])
        cubin = fake_cubin(**{variant.symbol + "_0": (128, 40)})
        artifacts.append(Artifact(facts=facts, cubin=cubin, plan=json.dumps(document).encode()))
    options = {"pack": "fa4-kernels-sm90a", "version": "0.1.0", "abi": ABI_HASH, "toolchain": {"ptxas": "13"}}
    pack = opened(write_builder_pack(build_pack(artifacts, **options), tmp_path))
    reader, device = PackReader(), Device(name="H200", compute_capability=(9, 0))

    assert len(pack.manifest.entries) == len(artifacts)
    for artifact in artifacts:
        axes = {name: artifact.facts.axes[name] for name in ("dtype", "head_dim", "head_dim_v", "mask")}
        entry = dispatch(Problem(**axes), device, [pack]).entry
        cubin, plan = reader.read(pack, entry)

        assert (entry.id, cubin) == (artifact.facts.id, artifact.cubin)
        assert encode_plan(*bound_plan(parse_plan(plan), entry))


def test_a_group_that_is_decompressed_ahead_is_read_once_and_its_damage_told_by_the_read(tmp_path, monkeypatch):
    """What `expect` began, `read` takes; a flipped byte is an error of the read, not of the announcement."""
    decompressed = []
    plain = packs._decompress
    monkeypatch.setattr(packs, "_decompress", lambda pack, group: decompressed.append(group.file) or plain(pack, group))
    pack = opened(write_pack(tmp_path / "pack", ("fwd-sm90a-bf16-hd64-full",)))
    (entry,), (group,) = pack.manifest.entries, pack.manifest.groups
    whole, damaged = packs.PackReader(), packs.PackReader()
    whole.expect(pack, group)

    assert whole.read(pack, entry) == packs.PackReader().read(pack, entry)
    assert len(decompressed) == 2  # one of each reader

    file = tmp_path / "pack" / group.file
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    damaged.expect(pack, group)
    with pytest.raises(PackError, match="differs from the manifest"):
        damaged.read(pack, entry)


def test_preload_decompresses_a_group_once(tmp_path, monkeypatch, launcher, fake):
    """Two packs of one group each, kernels of both on two devices: 2 decompressions, 3 kernels, each on 2 devices."""
    from fa4_kernels.loader import Runtime

    decompressed = []
    plain = packs._decompress
    monkeypatch.setattr(packs, "_decompress", lambda pack, group: decompressed.append(group.file) or plain(pack, group))
    ids = [("fwd-sm90a-bf16-hd64-full", "fwd-sm90a-bf16-hd128-full"), ("fwd-sm90a-fp16-hd64-full",)]
    both = tuple(opened(write_pack(tmp_path / f"pack{number}", names)) for number, names in enumerate(ids))
    runtime = Runtime(driver_path=fake.path, packs=both, stream_of=lambda ordinal: 0)

    assert runtime.preload([0, 1]) == tuple(sorted(name for names in ids for name in names))
    assert len(decompressed) == 2
    assert fake.num_functions == 6


@pytest.mark.parametrize("depth", [2_000, 500_000])
@pytest.mark.parametrize("place", ["toolchain", "alone"])
def test_deep_nesting_refuses_its_own_pack_alone(tmp_path, depth, place):
    """One damaged pack hides no other: it is a RefusedPack, not an error of Python."""
    directory = write_pack(tmp_path / "pack", IDS)
    nested = "[" * depth + "]" * depth
    text = (directory / "manifest.json").read_text()
    whole = text.replace('"toolchain":{}', f'"toolchain":{nested}') if place == "toolchain" else nested
    (directory / "manifest.json").write_text(whole)
    write_seal(directory)
    found = packs.open_pack("test", directory)
    assert isinstance(found, packs.RefusedPack) or depth < 10_000
    assert isinstance(found, packs.Pack) or "its manifest is damaged" in found.reason


def test_versions_sort_as_pip_sorts_them():
    """Numbers as numbers; what comes before a release and after it."""
    rising = ["0.0.9", "0.1.0.dev3", "0.1.0rc1", "0.1.0", "0.1.0.post1", "0.2", "0.10.0", "1.0"]
    keys = [packs._version_key(version) for version in rising]
    assert keys == sorted(keys)
    assert packs._version_key("1.0.0") == packs._version_key("1")
    assert packs._version_key("nonsense") < keys[0]
