"""Contract of fa4build.shipping.manifest.

A manifest is canonical JSON of schema 1: sorted entries, unique ids, groups tiled by blobs without gap or overlap. It
reads back to an equal value. Whatever is newer, damaged, edited or contradictory is one WheelError.
"""

import dataclasses
import json

import pytest

from fa4build.errors import WheelError
from fa4build.shipping.manifest import (
    Manifest,
    collect,
    group_file_name,
    manifest_from_json,
    manifest_to_json,
    pack_import_name,
)
from fa4build.shipping.pack import build_pack
from fa4build.store.evidence import Evidence
from tests.artifacts import ABI, TOOLCHAIN, made_up_artifact, made_up_family


def small_manifest() -> Manifest:
    """Two variants in one group."""
    artifacts = [made_up_artifact(mask="causal"), made_up_artifact(mask="full")]
    return build_pack(artifacts, pack="fa4-kernels-sm90a", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN).manifest


def edited(**changes: object) -> str:
    """The small manifest's JSON with top-level fields replaced, still canonical in form."""
    document = {**json.loads(manifest_to_json(small_manifest())), **changes}
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


def edited_entry(**changes: object) -> str:
    """The small manifest's JSON with fields of its first entry replaced."""
    document = json.loads(manifest_to_json(small_manifest()))
    document["entries"][0].update(changes)
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


def test_manifest_reads_back_equal() -> None:
    """JSON is a faithful form of the value."""
    manifest = small_manifest()

    assert manifest == manifest_from_json(manifest_to_json(manifest))


def test_text_is_canonical() -> None:
    """One line, keys sorted, no spaces after separators, newline at the end, ASCII."""
    text = manifest_to_json(small_manifest())

    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) + "\n"
    assert text.count("\n") == 1
    assert text.isascii()


def test_top_level_is_that_of_the_format_page() -> None:
    """The field names of docs/formats.md section 3, with literal values."""
    document = json.loads(manifest_to_json(small_manifest()))
    entry = document["entries"][0]

    assert document["schema"] == 1
    assert document["pack"] == "fa4-kernels-sm90a"
    assert document["family"] == "fa4"
    assert document["version"] == "0.1.0"
    assert document["abi"] == "ab" * 32
    assert document["targets"] == ["sm_90a"]
    assert document["toolchain"] == {"nvidia-cutlass-dsl": "4.8.1", "ptxas": "13.1.80"}
    assert sorted(document["groups"][0]) == ["file", "raw_size", "sha256", "size"]
    assert " ".join(sorted(entry)) == (
        "axes cubin evidence id key op plan registers shared_bytes source_sha256 spill_bytes symbols target tuning"
    )
    assert sorted(entry["cubin"]) == ["group", "offset", "sha256", "size"]
    assert entry["evidence"] == {"static": None, "simulated": None, "silicon": None}


def test_entries_are_sorted_by_id_whatever_the_order_given() -> None:
    """Building order leaves no trace."""
    entries = small_manifest().entries
    again = collect(
        reversed(entries),
        groups=small_manifest().groups,
        pack="fa4-kernels-sm90a",
        version="0.1.0",
        abi=ABI,
        toolchain=TOOLCHAIN,
    )

    assert [e.id for e in again.entries] == ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full"]
    assert again == small_manifest()


def test_evidence_travels() -> None:
    """Summaries of records reach the manifest and come back."""
    artifact = made_up_artifact()
    evidence = Evidence(static={"registers": 168}, silicon={"device": "H200", "worst_ratio": 1.1})
    proven = dataclasses.replace(artifact, facts=dataclasses.replace(artifact.facts, evidence=evidence))
    pack = build_pack([proven], pack="p", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN)

    assert manifest_from_json(manifest_to_json(pack.manifest)).entries[0].facts.evidence == evidence


def test_newer_schema_is_refused_before_anything_else_is_read() -> None:
    """A later schema may change everything but `schema`; the message names both numbers and the way out."""
    with pytest.raises(WheelError, match=r"schema 2 is newer than this fa4build reads \(up to 1\).*Upgrade fa4build"):
        manifest_from_json('{"schema": 2, "rows": []}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"schema": 1', "not JSON", id="cut-off"),
        pytest.param("[]", "no manifest", id="not-an-object"),
        pytest.param("{}", "no manifest", id="no-schema"),
        pytest.param('{"schema": 1.0}', "no schema number", id="float-schema"),
        pytest.param('{"schema": true}', "no schema number", id="bool-schema"),
        pytest.param('{"schema": 0}', "no schema number", id="schema-zero"),
        pytest.param("[" * 100_000, "not JSON", id="nested-without-end"),
        pytest.param(edited(extra=1), "extra", id="unknown-field"),
        pytest.param(edited(abi="short"), "abi", id="abi-is-no-sha256"),
        pytest.param(edited(entries=[]), "entries", id="no-entries"),
        pytest.param(edited(targets=["sm_100a"]), "targets", id="targets-not-those-of-entries"),
        pytest.param(edited_entry(registers=-1), "registers", id="negative-count"),
        pytest.param(edited_entry(registers=168.0), "registers", id="float-count"),
        pytest.param(edited_entry(id="Fwd"), "id", id="id-grammar"),
        pytest.param(edited_entry(id="fwd-sm90a-bf16-hd128-full"), "repeated: fwd-sm90a-bf16-hd128-full", id="same-id"),
        pytest.param(edited_entry(id="zzz"), "sorted by id", id="unsorted"),
    ],
)
def test_bad_manifest_is_one_clear_error(text: str, message: str) -> None:
    """Each fault is named."""
    with pytest.raises(WheelError, match=message):
        manifest_from_json(text)


def test_edited_by_hand_is_refused() -> None:
    """The same JSON written with spaces has another digest, so it is no manifest of ours."""
    text = json.dumps(json.loads(manifest_to_json(small_manifest())), sort_keys=True) + "\n"

    with pytest.raises(WheelError, match="not in canonical form"):
        manifest_from_json(text)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        pytest.param("offset", +1, "without gap or overlap", id="gap"),
        pytest.param("size", +1, "without gap or overlap", id="overlap"),
        pytest.param("group", +1, "must lie in one group", id="other-group"),
    ],
)
def test_blobs_tile_their_group(field: str, change: int, message: str) -> None:
    """Moving one blob by one byte, or to a group that does not exist, is found."""
    document = json.loads(manifest_to_json(small_manifest()))
    document["entries"][0]["cubin"][field] += change

    with pytest.raises(WheelError, match=message):
        manifest_from_json(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


def test_group_must_exist() -> None:
    """Both blobs of an entry moved to a group that is not there."""
    document = json.loads(manifest_to_json(small_manifest()))
    for blob in ("cubin", "plan"):
        document["entries"][0][blob]["group"] = 7

    with pytest.raises(WheelError, match="group 7 of 1 does not exist"):
        manifest_from_json(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


def test_group_is_filled_to_its_end() -> None:
    """Bytes after the last blob belong to no entry."""
    document = json.loads(manifest_to_json(small_manifest()))
    document["groups"][0]["raw_size"] += 1

    with pytest.raises(WheelError, match="blobs fill"):
        manifest_from_json(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")


def test_65_entries_take_two_groups() -> None:
    """64 is the most a group holds."""
    pack = build_pack(made_up_family(65), pack="p", version="0.1.0", abi=ABI, toolchain=TOOLCHAIN)

    assert [group.file for group in pack.manifest.groups] == ["group-000.xz", "group-001.xz"]
    assert sum(entry.cubin.group == 0 for entry in pack.manifest.entries) == 64


def test_empty_pack_is_refused() -> None:
    """Nothing to pack is a mistake upstream, and the message says which."""
    with pytest.raises(WheelError, match="run `fa4build matrix` first"):
        collect([], groups=[], pack="p", version="0.1.0", abi=ABI, toolchain={})


def test_names() -> None:
    """Group files are numbered with three digits; a distribution's import name has underscores."""
    assert group_file_name(7) == "group-007.xz"
    assert pack_import_name("fa4-kernels-sm90a") == "fa4_kernels_sm90a"
    with pytest.raises(WheelError, match="pack name 'Fa4/x'"):
        pack_import_name("Fa4/x")
