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
import hashlib
import math
import os
import shutil
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
from fa4build.store.entries import (
    KEY,
    OBJECTS,
    Accept,
    CacheEntry,
    StoredObject,
    Use,
    no_collection,
    object_name,
    sealed,
    sizes_of,
    unsealed,
)
from fa4build.store.export import read_members, tar_of
from fa4build.store.keys import InputsAsText, key_of

_VERIFIED_ON_GET = ("cubin", "plan")  # what is shipped; PTX and log are verified when read
_USE_RESOLUTION_S = 24 * 3600.0  # how exactly the last use is known; noting it costs a write
_GRACE_S = 3600.0  # what lies there may be in use, where no lock says so
_WRITERS_S = 10.0  # how long a prune waits for writers
_STORE_LOCK = "store"
_LEFTOVERS = ("native/fa4build-native-*", "*/.*.tmp", "*/*/.*.tmp")


class CacheCorruptWarning(UserWarning):
    """An entry is damaged and counts as absent."""


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
        inputs = entry.inputs.parsed() if isinstance(entry.inputs, InputsAsText) else entry.inputs
        return dataclasses.replace(entry, inputs=inputs)

    def look_ahead(self, keys: Iterable[str]) -> None:
        """These will be asked for, one after another: where that takes long, fetch them side by side."""

    def read(self, entry: CacheEntry, name: str) -> bytes:
        """An object of an entry: `cubin`, `plan`, `ptx` or `log`.

        Raises: CacheCorruptError if its bytes do not match their digest, or are gone.
        """
        stored = entry.objects[name]
        if self._below is not None and not (self.root / object_name(stored.sha256)).exists():
            return self._below.read(entry, name)
        return self._check(entry, name, stored, whole=True)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All readable entries, sorted by name and key. Objects are not looked at."""
        found = {} if self._below is None else {entry.key: entry for entry in self._below.entries()}
        with no_collection():
            for key in self._keys():
                try:
                    found[key] = self._load(key)
                except (FileNotFoundError, CacheCorruptError):
                    continue
        return tuple(sorted(found.values(), key=lambda entry: (entry.name, entry.key)))

    def verify(self) -> tuple[str, ...]:
        """Read everything; one line for each thing that is wrong, none when all is well."""
        with no_collection():
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
            write_atomically(self._action_path(key), sealed(body), mode=0o444)
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
        entry = unsealed(action, key, last_use=0.0, origin=f"entry {key}")
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
            with no_collection():
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
                members[object_name(stored.sha256)] = self._check(entry, name, stored, whole=True)
        for key in chosen:  # after the objects, so that a reader that stops half way has no entry without them
            members[f"actions/{key}.json"] = self._action_path(key).read_bytes()
        write_atomically(path, tar_of(members))
        return len(chosen)

    def import_tar(self, path: Path) -> int:
        """Take the entries of a tar file that `export` wrote. Returns how many there were.

        Raises: CacheCorruptError if the file holds anything else, or bytes that do not match their digest. Everything
            is checked first; then nothing is taken.
        """
        members = read_members(path)
        objects = {PurePath(name).name: data for name, data in members.items() if name.startswith("objects/")}
        actions = {PurePath(name).stem: data for name, data in members.items() if name.startswith("actions/")}
        for digest, data in objects.items():
            if hashlib.sha256(data).hexdigest() != digest:
                raise CacheCorruptError(f"{path}: object {digest} has other contents. Export it again.")
        for key, data in actions.items():
            entry = unsealed(data, key, last_use=0.0, origin=f"{path}: entry {key}")
            missing = sorted(stored.sha256 for stored in entry.objects.values() if stored.sha256 not in objects)
            if missing:
                raise CacheCorruptError(f"{path}: entry {entry.name} lacks object {missing[0]}. Export it again.")
        with self._writing():
            # objects reach the disk before the first action is seen
            write_many(self.root, {object_name(name): data for name, data in objects.items()}, mode=0o444)
            write_many(self.root, {f"actions/{key}.json": data for key, data in actions.items()}, mode=0o444)
        return len(actions)

    # Inside

    def _keys(self) -> list[str]:
        """Keys of all actions, readable or not, sorted."""
        with _scandir(self._actions) as found:
            names = [entry.name for entry in found]
        return sorted(name[:-5] for name in names if name.endswith(".json") and KEY.fullmatch(name[:-5]))

    def _beside(self, name: str) -> list[Path]:
        return [path for path in (self.root / name).rglob("*") if path.is_file() and not path.is_symlink()]

    def _object_files(self) -> Iterator[os.DirEntry[str]]:
        """Every object."""
        with _scandir(self._objects) as folders:
            names = sorted(folder.name for folder in folders if len(folder.name) == 2)
        for name in names:
            with _scandir(f"{self._objects}/{name}") as files:
                yield from (file for file in files if KEY.fullmatch(file.name))

    def _uses(self) -> tuple[list[Use], list[tuple[str, float]]]:
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
                uses.append(Use(key=key, last_use=modified, sizes=sizes_of(data, key)))
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
        return unsealed(data, key, last_use=modified, origin=f"cache entry {path}")

    def _check(self, entry: CacheEntry, name: str, stored: StoredObject, *, whole: bool) -> bytes:
        """The bytes of an object (empty unless `whole`), once they are what the entry says."""
        path = f"{self.root}/{object_name(stored.sha256)}"
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
        path = self.root / object_name(digest)
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
