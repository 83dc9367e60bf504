"""Finished compiles on disk, found by what went into them (docs/formats.md, section 4).

    actions/<key>.json     what was compiled from what, and the digests of what came out
    objects/ab/<sha256>    cubin, PTX, launch plan, log

The key is formed before compiling, from everything that decides the result. Files appear whole or not at all and are
never changed, so readers need no lock; the lock per key only keeps two processes from compiling the same thing. What is
damaged counts as absent. Values go in and out as bytes: this module knows no kernels.
"""

import dataclasses
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fa4build.errors import CacheCorruptError
from fa4build.files import write_atomically

if TYPE_CHECKING:
    import filelock

KEY_SCHEMA = 1
"""Version of what goes into a key. A change of meaning needs a new number, which makes every older entry a miss."""

OBJECTS = ("cubin", "plan", "ptx", "log")
_VERIFIED_ON_GET = ("cubin", "plan")  # what is shipped; PTX and log are verified when read
_KEY = re.compile(r"[0-9a-f]{64}")
_MEMBER = re.compile(r"actions/[0-9a-f]{64}\.json|objects/([0-9a-f]{2})/\1[0-9a-f]{62}")
_USE_RESOLUTION_S = 24 * 3600.0  # how exactly the last use is known; noting it costs a write
_GRACE_S = 3600.0  # a writer may be between an object and its action
_LEFTOVERS = ("work/*", "locks/*", "native/fa4build-native-*", "*/.*.tmp", "*/*/.*.tmp")


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
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


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

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._actions = self.root / "actions"
        self._objects = self.root / "objects"

    # Reading

    def get(self, key: str) -> CacheEntry | None:
        """The entry of a key, or None. A damaged one is None too, with a CacheCorruptWarning.

        Cubin and plan have matched their digests when it returns; PTX and log are there, with their sizes.
        """
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
        return entry

    def read(self, entry: CacheEntry, name: str) -> bytes:
        """An object of an entry: `cubin`, `plan`, `ptx` or `log`.

        Raises: CacheCorruptError if its bytes do not match their digest, or are gone.
        """
        return self._check(entry, name, entry.objects[name], whole=True)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All readable entries, sorted by name and key. Objects are not looked at."""
        found = []
        for key in self._keys():
            try:
                found.append(self._load(key))
            except (FileNotFoundError, CacheCorruptError):
                continue
        return tuple(sorted(found, key=lambda entry: (entry.name, entry.key)))

    def verify(self) -> tuple[str, ...]:
        """Read everything; one line for each thing that is wrong, none when all is well."""
        problems = []
        for key in self._keys():
            try:
                entry = self._load(key)
            except CacheCorruptError as error:
                problems.append(str(error))
                continue
            for name, stored in entry.objects.items():
                try:
                    self._check(entry, name, stored, whole=True)
                except CacheCorruptError as error:
                    problems.append(str(error))
        return tuple(problems)

    def size(self) -> CacheSize:
        """How much there is."""
        entries = self.entries()
        used = {stored.sha256 for entry in entries for stored in entry.objects.values()}
        sizes = {path.name: path.stat().st_size for path in self._object_paths()}
        return CacheSize(
            entries=len(entries),
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
        stored = {kind: self._store(data) for kind, data in sorted(objects.items())}
        key = key_of(inputs)
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
        for name in entry.objects:
            self._store(objects[name])
        self._actions.mkdir(parents=True, exist_ok=True)
        write_atomically(self._action_path(key), action, mode=0o444)
        return self._load(key)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of a key over its compile. The kernel drops it when the holder dies."""
        with self._file_lock(key):
            yield

    def try_lock(self, key: str) -> Callable[[], None] | None:
        """Take the lock of a key if nobody holds it. Returns the function that releases it, in this thread, or None."""
        import filelock

        lock = self._file_lock(key)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        return lock.release

    def work_dir(self, name: str, key: str) -> Path:
        """Where the compile of a key works, and leaves source and log if it fails. Not made here."""
        return self.root / "work" / f"{name}-{key[:16]}"

    def prune(self, *, max_age_s: float = math.inf, max_bytes: float = math.inf, now: float | None = None) -> Pruned:
        """Remove entries not used for `max_age_s`, then the longest unused ones until at most `max_bytes` are left.

        Damaged entries, unreferenced objects and what killed processes left go too, once they are an hour old. Of what
        lies beside the kernels (BESIDE), files go that are older than `max_age_s`.
        """
        now = time.time() if now is None else now
        before = self.size()
        kept: dict[str, int] = {}
        evicted: set[str] = set()
        for entry in sorted(self.entries(), key=lambda entry: -entry.last_use):
            sizes = {stored.sha256: stored.size for stored in entry.objects.values()}
            if now - entry.last_use <= max_age_s and sum((kept | sizes).values()) <= max_bytes:
                kept |= sizes
            else:
                self._action_path(entry.key).unlink(missing_ok=True)
                evicted |= sizes.keys()
        readable = {entry.key for entry in self.entries()}
        leftovers = [self._action_path(key) for key in self._keys() if key not in readable]
        leftovers += [path for pattern in _LEFTOVERS for path in self.root.glob(pattern)]
        for path in self._object_paths():
            if path.name in evicted - kept.keys():
                path.unlink(missing_ok=True)
            elif path.name not in kept:
                leftovers.append(path)
        for path in leftovers:
            _remove_if_old(path, now)
        for path in (path for name in BESIDE for path in self._beside(name)):
            _remove_if_old(path, now, max(max_age_s, _GRACE_S))
        after = self.size()
        return Pruned(
            removed_entries=before.entries - after.entries,
            freed_bytes=before.object_bytes - after.object_bytes,
            kept_entries=after.entries,
            kept_bytes=after.object_bytes,
        )

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
        for data in objects.values():
            self._store(data)
        self._actions.mkdir(parents=True, exist_ok=True)
        for key, data in actions.items():
            write_atomically(self._action_path(key), data, mode=0o444)
        return len(actions)

    # Inside

    def _keys(self) -> list[str]:
        """Keys of all actions, readable or not, sorted."""
        return sorted(path.stem for path in self._actions.glob("*.json") if _KEY.fullmatch(path.stem))

    def _beside(self, name: str) -> list[Path]:
        return [path for path in (self.root / name).rglob("*") if path.is_file() and not path.is_symlink()]

    def _object_paths(self) -> Iterator[Path]:
        return (path for path in self._objects.glob("??/*") if _KEY.fullmatch(path.name))

    def _action_path(self, key: str) -> Path:
        return self._actions / f"{key}.json"

    def _load(self, key: str) -> CacheEntry:
        path = self._action_path(key)
        return _unsealed(path.read_bytes(), key, last_use=path.stat().st_mtime, origin=f"cache entry {path}")

    def _check(self, entry: CacheEntry, name: str, stored: StoredObject, *, whole: bool) -> bytes:
        """The bytes of an object (empty unless `whole`), once they are what the entry says."""
        path = self.root / _object_name(stored.sha256)
        try:
            size = path.stat().st_size
            data = path.read_bytes() if whole else b""
        except FileNotFoundError:
            raise CacheCorruptError(f"cache entry {entry.name}: its {name} is gone ({path}).") from None
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

    def _note_use(self, entry: CacheEntry) -> None:
        if time.time() - entry.last_use > _USE_RESOLUTION_S:
            try:
                os.utime(self._action_path(entry.key))
            except OSError:
                pass  # a cache that is read only, or was pruned meanwhile, still serves

    def _file_lock(self, key: str) -> "filelock.FileLock":
        import filelock

        directory = self.root / "locks"
        directory.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(directory / f"{key}.lock")


# --- entries as files -------------------------------------------------------------------------------------------------


def _object_name(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _sealed(body: Mapping[str, Any]) -> bytes:
    """An action file: the body and its own digest."""
    return _json({"body": body, "sha256": hashlib.sha256(_json(body)).hexdigest()}) + b"\n"


def _unsealed(data: bytes, key: str, *, last_use: float, origin: str) -> CacheEntry:
    """The entry in an action file. Raises: CacheCorruptError unless every byte of it is as it was written."""
    try:
        document = json.loads(data)
        body = document["body"]
        if hashlib.sha256(_json(body)).hexdigest() != document["sha256"]:
            raise CacheCorruptError(f"{origin} is damaged: it does not match its digest.")
        if body["key"] != key or key_of(body["inputs"]) != key:
            raise CacheCorruptError(f"{origin} is damaged: it holds the entry of another key.")
        objects = {name: StoredObject(**stored) for name, stored in body["objects"].items()}
        entry = CacheEntry(
            key=key, name=body["name"], inputs=body["inputs"], facts=body["facts"], objects=objects, last_use=last_use
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheCorruptError(f"{origin} is damaged: no entry ({type(error).__name__}: {error}).") from error
    return entry


def _read_members(path: Path) -> dict[str, bytes]:
    """Name and contents of everything in a tar file; only the names that `export` writes are let through."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, mode="r:") as tar:
            for info in tar:
                if not info.isreg() or not _MEMBER.fullmatch(info.name):
                    raise CacheCorruptError(f"{path}: {info.name!r} is no part of an exported cache.")
                members[info.name] = tar.extractfile(info).read()
    except (tarfile.TarError, EOFError) as error:
        raise CacheCorruptError(f"{path}: no exported cache ({error}). `fa4build cache export` writes one.") from error
    return members


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
