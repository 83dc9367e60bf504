"""What a pack holds, as frozen values and as canonical JSON (docs/formats.md section 3, schema 1).

The manifest is the pack's only index: packing iterates it, reading proves it against the payload both ways.
This module knows nothing of files or compression (pack.py) nor of wheels (wheel.py).
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from fa4build.errors import WheelError
from fa4build.runtime.fa4_kernels.evidence import backed_levels
from fa4build.store.evidence import Evidence

if TYPE_CHECKING:
    import jsonschema

SCHEMA_VERSION = 1
FAMILY = "fa4"
MAX_GROUP_ENTRIES = 64
EVIDENCE_STATES = ("silicon", "simulated", "static", "claimed", "none")
"""Of an entry: the highest level that a record backs, one that nothing backs, or no level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Where some bytes lie: group number, offset and size in the decompressed group (bytes), and their sha256."""

    group: int
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One xz file: its name in the pack, sha256 and size as stored, and its size when decompressed (bytes)."""

    file: str
    sha256: str
    size: int
    raw_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one built variant apart from where its bytes lie.

    `axes` holds every axis of the variant, JSON scalars only. `symbols` are the device entries of the cubin, in
    launch order. `registers` is the largest count of any entry, `spill_bytes` their sum, `shared_bytes` the largest.
    """

    id: str
    op: str
    target: str
    axes: Mapping[str, object]
    symbols: tuple[str, ...]
    registers: int
    spill_bytes: int
    shared_bytes: int
    source_sha256: str
    key: str
    tuning: Mapping[str, object] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel variant of a pack: its facts and its two blobs."""

    facts: Facts
    cubin: Blob
    plan: Blob

    @property
    def id(self) -> str:
        """The variant id, unique in a pack."""
        return self.facts.id

    @property
    def evidence_level(self) -> str:
        """The highest level that a record backs; `claimed` if only others are named, `none` if none is."""
        passed = backed_levels(
            self.facts.evidence.as_dict(),
            kernel=self.id,
            target=self.facts.target,
            cubin_sha256=self.cubin.sha256,
            plan_sha256=self.plan.sha256,
        )
        return passed[-1] if passed else "none" if self.facts.evidence.level == "none" else "claimed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one pack. Entries are sorted by id; `targets` are the distinct targets of the entries, sorted.

    `recipes` say how operators are computed from the entries, as JSON objects (docs/formats.md, section 5).
    """

    pack: str
    version: str
    abi: str
    targets: tuple[str, ...]
    toolchain: Mapping[str, str]
    groups: tuple[Group, ...]
    entries: tuple[Entry, ...]
    family: str = FAMILY
    recipes: tuple[Mapping[str, Any], ...] = ()

    @property
    def raw_bytes(self) -> int:
        """Bytes of all groups when decompressed."""
        return sum(group.raw_size for group in self.groups)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all groups as stored."""
        return sum(group.size for group in self.groups)


def collect(
    entries: Iterable[Entry],
    *,
    groups: Iterable[Group],
    pack: str,
    version: str,
    abi: str,
    toolchain: Mapping[str, str],
    family: str = FAMILY,
    recipes: Iterable[Mapping[str, Any]] = (),
) -> Manifest:
    """Join placed entries and their groups to the manifest of one pack.

    Raises: WheelError when there is no entry, two entries share an id, or entries and groups contradict each other.
    """
    ordered = tuple(sorted(entries, key=lambda entry: entry.id))
    if not ordered:
        raise WheelError(
            f"pack {pack}: no entries. A pack holds at least one built variant; run `fa4build matrix` first."
        )
    manifest = Manifest(
        pack=pack,
        version=version,
        abi=abi,
        targets=tuple(sorted({entry.facts.target for entry in ordered})),
        toolchain=dict(sorted(toolchain.items())),
        groups=tuple(groups),
        entries=ordered,
        family=family,
        recipes=tuple(sorted(recipes, key=lambda recipe: recipe["id"])),
    )
    _check_consistency(manifest)
    return manifest


def manifest_to_json(manifest: Manifest) -> str:
    """The canonical text: one line, keys sorted, no spaces, newline at the end."""
    document = {
        "schema": SCHEMA_VERSION,
        "pack": manifest.pack,
        "family": manifest.family,
        "version": manifest.version,
        "abi": manifest.abi,
        "targets": list(manifest.targets),
        "toolchain": dict(manifest.toolchain),
        "groups": [_fields(group) for group in manifest.groups],
        "entries": [_entry_document(entry) for entry in manifest.entries],
    }
    if manifest.recipes:
        document["recipes"] = list(manifest.recipes)
    return canonical_json(document) + "\n"


def manifest_from_json(text: str | bytes, *, origin: str = "manifest.json") -> Manifest:
    """Read a manifest and prove it well-formed; `origin` names it in messages.

    Raises: WheelError when the text is not JSON, is of a newer schema, breaks the JSON schema, is not canonical, or
        contradicts itself (order, duplicate ids, blobs that overlap or leave gaps).
    """
    document = _parse(text, origin)
    _check_schema_version(document, origin)
    _check_schema(document, origin)
    manifest = Manifest(
        pack=document["pack"],
        family=document["family"],
        version=document["version"],
        abi=document["abi"],
        targets=tuple(document["targets"]),
        toolchain=document["toolchain"],
        groups=tuple(Group(**group) for group in document["groups"]),
        entries=tuple(_entry_value(entry) for entry in document["entries"]),
        recipes=tuple(document.get("recipes", ())),
    )
    _check_consistency(manifest)
    raw = text.encode() if isinstance(text, str) else text
    if manifest_to_json(manifest).encode() != raw:
        raise WheelError(f"{origin}: not in canonical form (one line, sorted keys). It was edited; rebuild the pack.")
    return manifest


def canonical_json(document: object) -> str:
    """JSON with sorted keys, no spaces, ASCII only; NaN and infinities are refused (ValueError)."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@functools.cache
def manifest_schema() -> Mapping[str, object]:
    """The JSON schema of a manifest (draft 2020-12)."""
    return json.loads(resources.files("fa4build").joinpath("schemas/manifest.json").read_text(encoding="utf-8"))


@functools.cache
def _validator() -> "jsonschema.Validator":
    """A validator to which 1.0 is no integer: a float is no file offset."""
    import jsonschema  # slow to import, and only reading needs it

    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return strict(manifest_schema())


def _fields(value: Blob | Group) -> dict[str, object]:
    """The fields of a flat value as a JSON object."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _entry_document(entry: Entry) -> dict[str, object]:
    """One entry as the object of the manifest."""
    facts = entry.facts
    document = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
    document["axes"] = dict(facts.axes)
    document["tuning"] = dict(facts.tuning)
    document["symbols"] = list(facts.symbols)
    document["evidence"] = facts.evidence.as_dict()
    return {**document, "cubin": _fields(entry.cubin), "plan": _fields(entry.plan)}


def _entry_value(document: Mapping[str, object]) -> Entry:
    """The inverse of `_entry_document`; the document has passed the JSON schema."""
    facts = {name: document[name] for name in Facts.__dataclass_fields__}
    facts["symbols"] = tuple(facts["symbols"])
    facts["evidence"] = Evidence(**facts["evidence"])
    return Entry(facts=Facts(**facts), cubin=Blob(**document["cubin"]), plan=Blob(**document["plan"]))


def _parse(text: str | bytes, origin: str) -> dict[str, object]:
    """The JSON object of the text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WheelError(
            f"{origin}: not JSON ({error}). The file is damaged; get the pack again or rebuild it."
        ) from error
    if not isinstance(document, dict) or "schema" not in document:
        raise WheelError(f"{origin}: JSON, but no manifest: it has no `schema`. A pack's manifest.json is expected.")
    return document


def _check_schema_version(document: Mapping[str, object], origin: str) -> None:
    """Refuse what is newer before looking at anything else in it."""
    schema = document["schema"]
    if type(schema) is not int or schema < 1:
        raise WheelError(f"{origin}: schema {schema!r} is no schema number. Allowed: 1 to {SCHEMA_VERSION}.")
    if schema > SCHEMA_VERSION:
        raise WheelError(
            f"{origin}: schema {schema} is newer than this fa4build reads (up to {SCHEMA_VERSION}). "
            "Upgrade fa4build, or use a pack built by this version."
        )


def _check_schema(document: Mapping[str, object], origin: str) -> None:
    """Check against schemas/manifest.json; the first error by place is the message."""
    error = next(iter(sorted(_validator().iter_errors(document), key=lambda e: e.json_path)), None)
    if error is not None:
        raise WheelError(
            f"{origin}: {error.json_path}: {error.message}. The pack does not follow schema 1; rebuild it."
        )


def _check_consistency(manifest: Manifest) -> None:
    """Order, uniqueness, targets, and that each group is tiled by blobs exactly."""
    name = manifest.pack
    ids = [entry.id for entry in manifest.entries]
    if ids != sorted(set(ids)):
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        raise WheelError(
            f"pack {name}: entries must be sorted by id and unique; repeated: {', '.join(repeated) or 'none'}."
        )
    targets = sorted({entry.facts.target for entry in manifest.entries})
    if list(manifest.targets) != targets:
        raise WheelError(f"pack {name}: targets {list(manifest.targets)} are not those of its entries, {targets}.")
    for number, group in enumerate(manifest.groups):
        expected = group_file_name(number)
        if group.file != expected:
            raise WheelError(f"pack {name}: group {number} is called {group.file!r}; it must be {expected!r}.")
    _check_tiling(manifest)
    _check_recipes(manifest)


def _check_recipes(manifest: Manifest) -> None:
    """Recipes have unique ids and launch kernels of the same pack."""
    ids = [str(recipe["id"]) for recipe in manifest.recipes]
    if len(set(ids)) != len(ids):
        raise WheelError(f"pack {manifest.pack}: two recipes share an id: {', '.join(sorted(ids))}.")
    known = {entry.id for entry in manifest.entries}
    for recipe in manifest.recipes:
        missing = sorted({step["kernel"] for step in recipe["steps"]} - known)
        if missing:
            raise WheelError(
                f"pack {manifest.pack}: recipe {recipe['id']} needs {', '.join(missing)}, which is not in the pack. "
                "Select the kernels too, or build without the recipe."
            )


def _check_tiling(manifest: Manifest) -> None:
    """Blobs of a group, in order of offset, must follow each other without gap or overlap and fill it."""
    placed: list[list[Blob]] = [[] for _ in manifest.groups]
    for entry in manifest.entries:
        if entry.cubin.group != entry.plan.group:
            raise WheelError(f"pack {manifest.pack}: {entry.id}: cubin and plan must lie in one group.")
        if entry.cubin.group >= len(placed):
            raise WheelError(
                f"pack {manifest.pack}: {entry.id}: group {entry.cubin.group} of {len(placed)} does not exist."
            )
        placed[entry.cubin.group] += [entry.cubin, entry.plan]
    for group, blobs in zip(manifest.groups, placed, strict=True):
        if not 2 <= len(blobs) <= 2 * MAX_GROUP_ENTRIES:
            raise WheelError(
                f"pack {manifest.pack}: {group.file} holds {len(blobs) // 2} entries; "
                f"allowed: 1 to {MAX_GROUP_ENTRIES}."
            )
        end = 0
        for blob in sorted(blobs, key=lambda b: b.offset):
            if blob.offset != end:
                raise WheelError(
                    f"pack {manifest.pack}: {group.file}: a blob starts at byte {blob.offset}, expected {end}: "
                    "blobs must follow each other without gap or overlap."
                )
            end += blob.size
        if end != group.raw_size:
            raise WheelError(f"pack {manifest.pack}: {group.file}: blobs fill {end} bytes of {group.raw_size}.")


def evidence_summary(entries: Iterable[Entry]) -> str:
    """How many kernels have which highest level: `2 simulated, 1 none`."""
    found = [entry.evidence_level for entry in entries]
    return ", ".join(f"{found.count(state)} {state}" for state in EVIDENCE_STATES if state in found)


def hardware_sentences(entries: Iterable[Entry]) -> str:
    """For each target: whether its kernels have run on hardware, by the records in the manifest."""
    by_target: dict[str, list[str]] = {}
    for entry in entries:
        by_target.setdefault(entry.facts.target, []).append(entry.evidence_level)
    return " ".join(_hardware_sentence(target, levels) for target, levels in sorted(by_target.items()))


def _hardware_sentence(target: str, levels: list[str]) -> str:
    count, total = levels.count("silicon"), len(levels)
    if count == 0:
        return f"No {target} kernel here has run on hardware."
    if count < total:
        return f"{count} of the {total} {target} kernels here have run on hardware; the others have not."
    return f"Every {target} kernel here has run on hardware."


def group_file_name(number: int) -> str:
    """`group-000.xz` and so on."""
    return f"group-{number:03d}.xz"


def pack_import_name(pack: str) -> str:
    """The import package of a pack: `fa4-kernels-sm90a` -> `fa4_kernels_sm90a`."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", pack):
        raise WheelError(f"pack name {pack!r}: allowed are lower-case letters and digits in fields separated by '-'.")
    return pack.replace("-", "_")
