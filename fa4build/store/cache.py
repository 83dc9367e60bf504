"""Finished compiles on disk, found by what went into them (docs/formats.md, section 4).

    actions/<key>.json     what was compiled from what, and the digests of what came out
    objects/ab/<sha256>    cubin, PTX, launch plan, log

The key is formed before compiling, from everything that decides the result. Files appear whole or not at all and are
never changed, so readers need no lock; the lock per key only keeps two processes from compiling the same thing. Writers
share the lock of the store from an entry's first object to its action, and a prune holds it alone, so that what nothing
points to then belongs to nobody. What is damaged counts as absent. Values go in and out as bytes: this module knows no
kernels.
"""

import dataclasses
import gc
import hashlib
import io
import json
import math
import os
import re
import shutil
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from fa4build.errors import CacheCorruptError
from fa4build.files import write_atomically, write_many
from fa4build.store import locks

KEY_SCHEMA = 1
"""Version of what goes into a key. A change of meaning needs a new number, which makes every older entry a miss."""

OBJECTS = ("cubin", "plan", "ptx", "log")
_VERIFIED_ON_GET = ("cubin", "plan")  # what is shipped; PTX and log are verified when read
_KEY = re.compile(r"[0-9a-f]{64}")
_MEMBER = re.compile(r"actions/[0-9a-f]{64}\.json|objects/([0-9a-f]{2})/\1[0-9a-f]{62}")
_USE_RESOLUTION_S = 24 * 3600.0  # how exactly the last use is known; noting it costs a write
_GRACE_S = 3600.0  # what lies there may be in use, where no lock says so
_WRITERS_S = 10.0  # how long a prune waits for writers
_STORE_LOCK = "store"
_LEFTOVERS = ("native/fa4build-native-*", "*/.*.tmp", "*/*/.*.tmp")


class CacheCorruptWarning(UserWarning):
    """An entry is damaged and counts as absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Digest and size (bytes) of one object."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One finished compile.

    Attributes:
        key: sha256 of the canonical JSON of `inputs`.
        name: the variant's id.
        inputs: everything that went into the key.
        facts: what was read back from the result: symbols, registers, ...
        objects: by name (OBJECTS).
        last_use: seconds since the epoch, to within a day; not part of the entry's value.
    """

    key: str
    name: str
    inputs: Mapping[str, Any]
    facts: Mapping[str, Any]
    objects: Mapping[str, StoredObject]
    last_use: float = dataclasses.field(compare=False)

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(stored.size for stored in self.objects.values())


Accept = Callable[[CacheEntry, Mapping[str, bytes]], None]
"""Looks at an entry and its objects, by name, before they are taken over."""


# --- keys -------------------------------------------------------------------------------------------------------------


def canonical(value: object) -> Any:
    """A value as JSON in which different values differ and equal ones are equal, on every machine.

    Dataclasses keep their type and every field; floats are exact. Refused is what has no such form: paths (a checkout
    must not matter), sets, bytes, NaN, objects.

    Raises: TypeError naming the type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return {"$float": value.hex()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: canonical(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [canonical(item) for item in value]
    if isinstance(value, Mapping) and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: canonical(item) for name, item in value.items()}
    hint = " A key must not depend on where files lie." if isinstance(value, PurePath) else ""
    raise TypeError(f"{type(value).__name__} {value!r} cannot be part of a cache key.{hint}")


def key_inputs(source: object, tuning: object, toolchain: object, options: object) -> dict[str, Any]:
    """Everything that goes into a key, as JSON.

    Args:
        source: the rendered kernel (`KernelSource`): variant, text, symbol, digests of all kernel code it reaches.
        tuning: `Tuning`; toolchain: `Toolchain`, with the compile process's environment; options: `CompileOptions`.
    """
    return {
        "schema": KEY_SCHEMA,
        "source": canonical(source),
        "tuning": canonical(tuning),
        "toolchain": canonical(toolchain),
        "options": canonical(options),
    }


def key_of(inputs: Mapping[str, Any]) -> str:
    """The key of `key_inputs`: 64 hexadecimal digits."""
    return hashlib.sha256(_json(inputs)).hexdigest()


def cache_key(source: object, tuning: object, toolchain: object, options: object) -> str:
    """The key under which the compile of a rendered kernel is stored."""
    return key_of(key_inputs(source, tuning, toolchain, options))


def _json(document: object) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_parsed_inputs)
    return text.encode()


def _parsed_inputs(value: object) -> dict[str, Any]:
    if isinstance(value, _Inputs):
        return value.parsed()
    raise TypeError(f"{type(value).__name__} cannot be part of an entry.")


# --- the store --------------------------------------------------------------------------------------------------------


BESIDE = ("forms", "native", "zig")
"""Folders of what proofs and the C compiler keep beside the kernels; made again when they are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Entries and objects of a cache; `unreferenced_bytes` is what no entry points to. `beside`: bytes of BESIDE."""

    entries: int
    objects: int
    object_bytes: int
    unreferenced_bytes: int
    beside: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune removed, and what is left."""

    removed_entries: int
    freed_bytes: int
    kept_entries: int
    kept_bytes: int


class Cache:
    """A cache directory. It is made by the first write, so looking into one that does not exist leaves no trace."""

    def __init__(self, root: Path, *, below: "Cache | None" = None) -> None:
        """`below`: a cache that is only read, as one that this user may not write; what it has is not copied."""
        self.root = Path(root)
        self._below = below
        self._actions = self.root / "actions"
        self._objects = self.root / "objects"

    # Reading

    def get(self, key: str) -> CacheEntry | None:
        """The entry of a key, or None. A damaged one is None too, with a CacheCorruptWarning.

        Cubin and plan have matched their digests when it returns; PTX and log are there, with their sizes.
        """
        entry = self._get(key)
        if entry is None and self._below is not None:
            entry = self._below.get(key)
            if entry is not None:
                self._take_records(entry)
        return entry

    def _get(self, key: str) -> CacheEntry | None:
        """From this directory alone."""
        try:
            entry = self._load(key)
            for name, stored in entry.objects.items():
                self._check(entry, name, stored, whole=name in _VERIFIED_ON_GET)
        except FileNotFoundError:
            return None
        except CacheCorruptError as error:
            warnings.warn(f"{error} It counts as absent.", CacheCorruptWarning, stacklevel=2)
            return None
        self._note_use(entry)
        inputs = entry.inputs.parsed() if isinstance(entry.inputs, _Inputs) else entry.inputs
        return dataclasses.replace(entry, inputs=inputs)

    def look_ahead(self, keys: Iterable[str]) -> None:
        """These will be asked for, one after another: where that takes long, fetch them side by side."""

    def read(self, entry: CacheEntry, name: str) -> bytes:
        """An object of an entry: `cubin`, `plan`, `ptx` or `log`.

        Raises: CacheCorruptError if its bytes do not match their digest, or are gone.
        """
        stored = entry.objects[name]
        if self._below is not None and not (self.root / _object_name(stored.sha256)).exists():
            return self._below.read(entry, name)
        return self._check(entry, name, stored, whole=True)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All readable entries, sorted by name and key. Objects are not looked at."""
        found = {} if self._below is None else {entry.key: entry for entry in self._below.entries()}
        with _no_collection():
            for key in self._keys():
                try:
                    found[key] = self._load(key)
                except (FileNotFoundError, CacheCorruptError):
                    continue
        return tuple(sorted(found.values(), key=lambda entry: (entry.name, entry.key)))

    def verify(self) -> tuple[str, ...]:
        """Read everything; one line for each thing that is wrong, none when all is well."""
        with _no_collection():
            return self._verify()

    def _verify(self) -> tuple[str, ...]:
        problems, whole = [], set()  # objects that many entries share are read once
        for key in self._keys():
            try:
                entry = self._load(key)
            except FileNotFoundError:
                continue
            except CacheCorruptError as error:
                problems.append(str(error))
                continue
            for name, stored in entry.objects.items():
                try:
                    if stored not in whole:
                        self._check(entry, name, stored, whole=True)
                        whole.add(stored)
                except CacheCorruptError as error:
                    problems.append(str(error))
        return tuple(problems)

    def size(self) -> CacheSize:
        """How much there is."""
        uses, _ = self._uses()
        used = {digest for use in uses for digest in use.sizes}
        sizes = {file.name: file.stat(follow_symlinks=False).st_size for file in self._object_files()}
        return CacheSize(
            entries=len(uses),
            objects=len(sizes),
            object_bytes=sum(sizes.values()),
            unreferenced_bytes=sum(size for name, size in sizes.items() if name not in used),
            beside={name: sum(path.stat().st_size for path in self._beside(name)) for name in BESIDE},
        )

    # Writing

    def put(
        self, *, name: str, inputs: Mapping[str, Any], facts: Mapping[str, Any], objects: Mapping[str, bytes]
    ) -> CacheEntry:
        """Store a finished compile under the key of its inputs, and return its entry.

        Args:
            objects: exactly OBJECTS.
        Contract: the entry is visible only when all of it is on disk; a writer that is killed leaves none.
        """
        if set(objects) != set(OBJECTS):
            raise ValueError(f"objects {sorted(objects)}; needed are exactly {sorted(OBJECTS)}")
        key = key_of(inputs)
        with self._writing():
            stored = {kind: self._store(data) for kind, data in sorted(objects.items())}
            body = {
                "key": key,
                "name": name,
                "inputs": inputs,
                "facts": facts,
                "objects": {kind: dataclasses.asdict(value) for kind, value in stored.items()},
            }
            self._actions.mkdir(parents=True, exist_ok=True)
            write_atomically(self._action_path(key), _sealed(body), mode=0o444)
            return self._load(key)

    def action(self, key: str) -> bytes:
        """The document of an entry, as `adopt` takes it."""
        return self._action_path(key).read_bytes()

    def adopt(
        self, key: str, action: bytes, objects: Mapping[str, bytes], *, accept: Accept | None = None
    ) -> CacheEntry:
        """Take over an entry that another cache wrote: its document (`action`) and its objects.

        Args:
            accept: raises what it likes if it does not want the entry with these objects.
        Raises: CacheCorruptError if the document is not that of this key, or an object is not what it says.
        """
        entry = _unsealed(action, key, last_use=0.0, origin=f"entry {key}")
        for name, stored in entry.objects.items():
            if hashlib.sha256(objects.get(name, b"")).hexdigest() != stored.sha256:
                raise CacheCorruptError(f"entry {entry.name}: its {name} is damaged.")
        if accept is not None:
            accept(entry, objects)
        with self._writing():
            for name in entry.objects:
                self._store(objects[name])
            self._actions.mkdir(parents=True, exist_ok=True)
            write_atomically(self._action_path(key), action, mode=0o444)
            return self._load(key)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of a key over its compile. The kernel drops it when the holder dies."""
        release = locks.take(self._lock_path(key), wait_s=None)
        assert release is not None, "waited as long as it takes"
        try:
            yield
        finally:
            release()

    def try_lock(self, key: str) -> Callable[[], None] | None:
        """Take the lock of a key if nobody holds it. Returns the function that releases it, or None."""
        return locks.take(self._lock_path(key))

    def work_dir(self, name: str, key: str) -> Path:
        """Where the compile of a key works, and leaves source and log if it fails. Not made here."""
        return self.root / "work" / f"{name}-{key[:16]}"

    def prune(self, *, max_age_s: float = math.inf, max_bytes: float = math.inf, now: float | None = None) -> Pruned:
        """Remove entries not used for `max_age_s`, then the longest unused ones until at most `max_bytes` are left.

        Damaged entries go too, and so does every object that nothing points to, whoever was killed before it was
        finished with it. Where writers leave no gap for ten seconds, objects that no removed entry had must be an hour
        old. What killed processes left elsewhere goes once it is an hour old and no lock says that it is in use. Of
        what lies beside the kernels (BESIDE), files go that are older than `max_age_s`.
        """
        now = time.time() if now is None else now
        release = locks.take(self._lock_path(_STORE_LOCK), wait_s=_WRITERS_S) if self.root.is_dir() else None
        try:
            with _no_collection():
                pruned = self._prune_entries(now - max_age_s, max_bytes, None if release else now - _GRACE_S)
        finally:
            if release is not None:
                release()
        self._sweep(now)
        for path in (path for name in BESIDE for path in self._beside(name)):
            _remove_if_old(path, now, max(max_age_s, _GRACE_S))
        return pruned

    def _prune_entries(self, oldest: float, max_bytes: float, unused_since: float | None) -> Pruned:
        """Entries and objects. `unused_since`: None = no writer is at work, so what nothing points to is nobody's."""
        uses, damaged = self._uses()
        kept: dict[str, int] = {}
        evicted: set[str] = set()
        removed, kept_bytes = 0, 0
        for use in sorted(uses, key=lambda use: -use.last_use):
            added = sum(size for digest, size in use.sizes.items() if digest not in kept)
            if use.last_use >= oldest and kept_bytes + added <= max_bytes:
                kept.update(use.sizes)
                kept_bytes += added
            else:
                self._action_path(use.key).unlink(missing_ok=True)
                evicted.update(use.sizes)
                removed += 1
        for key, written in damaged:
            if unused_since is None or written <= unused_since:
                self._action_path(key).unlink(missing_ok=True)
        freed, left = 0, 0
        for file in self._object_files():
            if file.name in kept:
                left += kept[file.name]
                continue
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                if unused_since is None or file.name in evicted or status.st_mtime <= unused_since:
                    _unlink(file.path)
                    freed += status.st_size
                else:
                    left += status.st_size
        return Pruned(removed_entries=removed, freed_bytes=freed, kept_entries=len(uses) - removed, kept_bytes=left)

    def _sweep(self, now: float) -> None:
        """What killed processes left beside the entries."""
        held = {path.name[:16] for path in self.root.glob("locks/*.lock") if not locks.is_free(path)}
        for path in self.root.glob("work/*"):
            if path.name[-16:] not in held:
                _remove_if_old(path, now)
        for path in self.root.glob("locks/*.lock"):
            if path.stem != _STORE_LOCK:
                locks.remove_unused(path, now - _GRACE_S)
        for path in (path for pattern in _LEFTOVERS for path in self.root.glob(pattern)):
            _remove_if_old(path, now)

    # Moving between machines

    def export_tar(self, path: Path, keys: Iterable[str] | None = None) -> int:
        """Write entries with their objects into a tar file, the same bytes for the same entries. Returns how many.

        Args:
            keys: which entries; default: all.
        Raises: CacheCorruptError if an object is damaged; then nothing is written.
        """
        chosen = self._keys() if keys is None else sorted(set(keys))
        members: dict[str, bytes] = {}
        for key in chosen:
            entry = self._load(key)
            for name, stored in entry.objects.items():
                members[_object_name(stored.sha256)] = self._check(entry, name, stored, whole=True)
        for key in chosen:  # after the objects, so that a reader that stops half way has no entry without them
            members[f"actions/{key}.json"] = self._action_path(key).read_bytes()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(data), 0o444, 0
                tar.addfile(info, io.BytesIO(data))
        write_atomically(path, buffer.getvalue())
        return len(chosen)

    def import_tar(self, path: Path) -> int:
        """Take the entries of a tar file that `export` wrote. Returns how many there were.

        Raises: CacheCorruptError if the file holds anything else, or bytes that do not match their digest. Everything
            is checked first; then nothing is taken.
        """
        members = _read_members(path)
        objects = {PurePath(name).name: data for name, data in members.items() if name.startswith("objects/")}
        actions = {PurePath(name).stem: data for name, data in members.items() if name.startswith("actions/")}
        for digest, data in objects.items():
            if hashlib.sha256(data).hexdigest() != digest:
                raise CacheCorruptError(f"{path}: object {digest} has other contents. Export it again.")
        for key, data in actions.items():
            entry = _unsealed(data, key, last_use=0.0, origin=f"{path}: entry {key}")
            missing = sorted(stored.sha256 for stored in entry.objects.values() if stored.sha256 not in objects)
            if missing:
                raise CacheCorruptError(f"{path}: entry {entry.name} lacks object {missing[0]}. Export it again.")
        with self._writing():
            # objects reach the disk before the first action is seen
            write_many(self.root, {_object_name(name): data for name, data in objects.items()}, mode=0o444)
            write_many(self.root, {f"actions/{key}.json": data for key, data in actions.items()}, mode=0o444)
        return len(actions)

    # Inside

    def _keys(self) -> list[str]:
        """Keys of all actions, readable or not, sorted."""
        with _scandir(self._actions) as found:
            names = [entry.name for entry in found]
        return sorted(name[:-5] for name in names if name.endswith(".json") and _KEY.fullmatch(name[:-5]))

    def _beside(self, name: str) -> list[Path]:
        return [path for path in (self.root / name).rglob("*") if path.is_file() and not path.is_symlink()]

    def _object_files(self) -> Iterator[os.DirEntry[str]]:
        """Every object."""
        with _scandir(self._objects) as folders:
            names = sorted(folder.name for folder in folders if len(folder.name) == 2)
        for name in names:
            with _scandir(f"{self._objects}/{name}") as files:
                yield from (file for file in files if _KEY.fullmatch(file.name))

    def _uses(self) -> tuple[list["_Use"], list[tuple[str, float]]]:
        """What every whole entry uses; key and time of the others. Inputs and facts are not looked at."""
        uses, damaged = [], []
        for key in self._keys():
            try:
                data, modified = _read(f"{self._actions}/{key}.json")
            except FileNotFoundError:
                continue
            except IsADirectoryError:
                continue  # nobody's, and not ours to remove; `verify` names it
            try:
                uses.append(_Use(key=key, last_use=modified, sizes=_sizes(data, key)))
            except CacheCorruptError:
                damaged.append((key, modified))
        return uses, damaged

    def _action_path(self, key: str) -> Path:
        return self._actions / f"{key}.json"

    def _load(self, key: str) -> CacheEntry:
        path = f"{self._actions}/{key}.json"
        try:
            data, modified = _read(path)
        except IsADirectoryError:
            raise CacheCorruptError(f"cache entry {path} is damaged: it is a directory.") from None
        return _unsealed(data, key, last_use=modified, origin=f"cache entry {path}")

    def _check(self, entry: CacheEntry, name: str, stored: StoredObject, *, whole: bool) -> bytes:
        """The bytes of an object (empty unless `whole`), once they are what the entry says."""
        path = f"{self.root}/{_object_name(stored.sha256)}"
        try:
            if whole:
                data, _ = _read(path)
                size = len(data)
            else:
                data, size = b"", os.stat(path).st_size  # noqa: PTH116 - a Path costs more than the call
        except FileNotFoundError:
            raise CacheCorruptError(f"cache entry {entry.name}: its {name} is gone ({path}).") from None
        except IsADirectoryError:
            raise CacheCorruptError(f"cache entry {entry.name}: its {name} is a directory ({path}).") from None
        if size != stored.size or (whole and hashlib.sha256(data).hexdigest() != stored.sha256):
            raise CacheCorruptError(f"cache entry {entry.name}: its {name} is damaged ({path}).")
        return data

    def _store(self, data: bytes) -> StoredObject:
        """Write an object, unless its bytes are there already."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.root / _object_name(digest)
        try:
            present = path.read_bytes() == data
        except FileNotFoundError:
            present = False
        if present:
            os.utime(path)  # young again: a prune must not take it before its new entry is written
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data, mode=0o444)
        return StoredObject(sha256=digest, size=len(data))

    def _take_records(self, entry: CacheEntry) -> None:
        """What is known of a kernel of the cache below is known here: proofs are looked for beside what is written."""
        assert self._below is not None, "the entry is from there"
        for record in self._below.root.glob(f"evidence/*/{entry.objects['cubin'].sha256}.json"):
            own = self.root / record.relative_to(self._below.root)
            if not own.exists():
                own.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(own, record.read_bytes())

    def _note_use(self, entry: CacheEntry) -> None:
        if time.time() - entry.last_use > _USE_RESOLUTION_S:
            try:
                os.utime(self._action_path(entry.key))
            except OSError:
                pass  # a cache that is read only, or was pruned meanwhile, still serves

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Beside other writers, and not beside a prune: what is written is pointed to before one looks."""
        release = locks.take(self._lock_path(_STORE_LOCK), shared=True, wait_s=None)
        assert release is not None, "waited as long as it takes"
        try:
            yield
        finally:
            release()

    def _lock_path(self, name: str) -> Path:
        return self.root / "locks" / f"{name}.lock"


def lack_of_rights(root: Path) -> str | None:
    """Why this process cannot write a cache at `root`, None if it can, or could make one there."""
    there = [path for path in (root, *(root / name for name in ("actions", "objects", "locks"))) if path.exists()]
    nearest = next((path for path in (root, *root.absolute().parents) if path.exists()), Path("/"))
    for path in there or [nearest]:
        if not os.access(path, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            return "a read-only file system" if is_read_only else f"this user may not write {path}"
    return None


# --- entries as files -------------------------------------------------------------------------------------------------


def _object_name(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _sealed(body: Mapping[str, Any]) -> bytes:
    """An action file: the body and its own digest."""
    return _json({"body": body, "sha256": hashlib.sha256(_json(body)).hexdigest()}) + b"\n"


_HEAD, _SEAL, _TAIL = b'{"body":', b',"sha256":"', b'"}\n'  # of what `_sealed` writes
_SEAL_BYTES = len(_SEAL) + 64 + len(_TAIL)
_INPUTS = b',"inputs":'
_OBJECTS_OF = b',"objects":'  # the last field of a body


def _sealed_body(data: bytes) -> bytes | None:
    """The body's own bytes, once their digest is right; None for a file that is written in any other way."""
    body, seal = data[len(_HEAD) : -_SEAL_BYTES], data[-_SEAL_BYTES:]
    whole = _SEAL + hashlib.sha256(body).hexdigest().encode() + _TAIL
    return body if data.startswith(_HEAD) and seal == whole else None


class _Inputs(Mapping[str, Any]):
    """Inputs as they stand in a file, parsed each time that somebody wants one: of many entries hardly anybody does."""

    __slots__ = ("_text",)

    def __init__(self, text: bytes) -> None:
        self._text = text

    def parsed(self) -> dict[str, Any]:
        """All of them, by one parse."""
        return json.loads(self._text)

    def __getitem__(self, name: str) -> Any:
        return self.parsed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parsed())

    def __len__(self) -> int:
        return len(self.parsed())

    def __repr__(self) -> str:
        return repr(self.parsed())


def _parsed_body(data: bytes, key: str) -> tuple[dict[str, Any], bool]:
    """The body of a file whose digest is right, and whether its inputs are known to be those of the key.

    They are left unparsed where they stand as `_sealed` writes them. Raises: CacheCorruptError, or as json does.
    """
    raw = _sealed_body(data)
    if raw is None:
        document = json.loads(data)
        if hashlib.sha256(_json(document["body"])).hexdigest() != document["sha256"]:
            raise CacheCorruptError("it does not match its digest")
        return document["body"], False
    start = raw.find(_INPUTS) + len(_INPUTS)
    end = raw.rfind(f',"key":"{key}","name":'.encode())
    if hashlib.sha256(raw[start:end]).hexdigest() != key:
        return json.loads(raw), False
    return json.loads(raw[:start] + b"{}" + raw[end:]) | {"inputs": _Inputs(raw[start:end])}, True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """What a prune wants to know of an entry: sizes of its objects by digest."""

    key: str
    last_use: float
    sizes: Mapping[str, int]


def _sizes(data: bytes, key: str) -> dict[str, int]:
    """Sizes of an entry's objects by digest. Of a whole file only these are parsed. Raises: CacheCorruptError."""
    body = _sealed_body(data)
    if body is None:
        objects: Any = {
            name: dataclasses.asdict(x) for name, x in _unsealed(data, key, last_use=0.0, origin=key).objects.items()
        }
    else:
        objects = json.loads(body[body.rindex(_OBJECTS_OF) + len(_OBJECTS_OF) : -1]) if _OBJECTS_OF in body else {}
    try:
        sizes = {str(stored["sha256"]): stored["size"] for stored in objects.values()}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError("a size in it is none")
        return sizes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheCorruptError(f"entry {key} is damaged: no entry ({error}).") from error


def _unsealed(data: bytes, key: str, *, last_use: float, origin: str) -> CacheEntry:
    """The entry in an action file. Raises: CacheCorruptError unless every byte of it is as it was written."""
    try:
        body, is_known = _parsed_body(data, key)
        if body["key"] != key or not (is_known or key_of(body["inputs"]) == key):
            raise CacheCorruptError("it holds the entry of another key")
        objects = {name: StoredObject(**stored) for name, stored in body["objects"].items()}
        if fault := _form_fault(body, objects):
            raise CacheCorruptError(fault)
        entry = CacheEntry(
            key=key, name=body["name"], inputs=body["inputs"], facts=body["facts"], objects=objects, last_use=last_use
        )
    except CacheCorruptError as error:
        raise CacheCorruptError(f"{origin} is damaged: {error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheCorruptError(f"{origin} is damaged: no entry ({type(error).__name__}: {error}).") from error
    return entry


_BLOCK = 512  # of a tar file
_NO_EXPORT = "`fa4build cache export` writes one."


def _form_fault(body: Mapping[str, Any], objects: Mapping[str, StoredObject]) -> str | None:
    """What of an entry has no form that `put` writes; a digest alone does not keep a stranger's file from the rest."""
    if set(objects) != set(OBJECTS):
        return f"its objects are {', '.join(sorted(objects))}"
    if type(body["name"]) is not str or type(body["facts"]) is not dict:
        return "its name or its facts are none"
    for stored in objects.values():
        if type(stored.sha256) is not str or not _KEY.fullmatch(stored.sha256) or type(stored.size) is not int:
            return "a digest or a size in it is none"
    return None


def _read_members(path: Path) -> dict[str, bytes]:
    """Name and contents of everything in a tar file; only what `export` writes is let through.

    Read here and not by `tarfile`, which takes longer for a member than all that is done with it.
    """
    members: dict[str, bytes] = {}
    whole_size = path.stat().st_size
    with path.open("rb") as file, _no_collection():
        while (header := file.read(_BLOCK)) != bytes(_BLOCK):
            name, size = _member(header, path)
            data = file.read(min(size, whole_size))
            file.seek(-size % _BLOCK, os.SEEK_CUR)
            if len(data) != size:
                raise CacheCorruptError(f"{path}: no exported cache (cut short in {name}). {_NO_EXPORT}")
            members[name] = data
    return members


def _member(header: bytes, path: Path) -> tuple[str, int]:
    """Name and size of the member that a header (POSIX ustar) announces. Raises: CacheCorruptError."""
    try:
        if len(header) != _BLOCK:
            raise ValueError("cut short" if header else "it ends without an end")
        total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        if header[257:262] != b"ustar" or int(header[148:156].split(b"\0")[0], 8) != total:
            raise ValueError("no tar file")
        name, size = header[:100].rstrip(b"\0").decode(), int(header[124:136].split(b"\0")[0], 8)
    except ValueError as error:
        raise CacheCorruptError(f"{path}: no exported cache ({error}). {_NO_EXPORT}") from error
    if header[156:157] not in (b"0", b"\0") or header[345:500].strip(b"\0") or not _MEMBER.fullmatch(name):
        raise CacheCorruptError(f"{path}: {name!r} is no part of an exported cache.")
    return name, size


def _read(path: str) -> tuple[bytes, float]:
    """Contents of a file and when it was last modified. By system calls, since a file object costs more than them."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        data = os.read(handle, status.st_size + 1)
        while len(data) < status.st_size and (more := os.read(handle, status.st_size)):
            data += more
        return data, status.st_mtime
    finally:
        os.close(handle)


@contextmanager
def _no_collection() -> Iterator[None]:
    """While many values are made that all live on, looking for garbage among them costs more than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _scandir(path: Path | str) -> Iterator[Iterable[os.DirEntry[str]]]:
    """As os.scandir; a directory that is not there has nothing in it."""
    try:
        with os.scandir(path) as found:
            yield found
    except (FileNotFoundError, NotADirectoryError):
        yield ()


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - a Path costs more than the call


def _remove_if_old(path: Path, now: float, age_s: float = _GRACE_S) -> None:
    """Remove what a running process can no longer need."""
    try:
        if now - path.stat().st_mtime <= age_s:
            return
    except FileNotFoundError:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
