"""Contract of a store that many processes share and that something always goes wrong with.

A lock that is held is never taken away by a prune, however old its file. What killed processes left over goes at the
next prune, so that a size limit holds after it. A writer and a prune never see half of each other. A store that may not
be written is read, and what it lacks is kept elsewhere, which one line says. A disk that is full is told with path and
size, and fails one kernel alone.
"""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fa4build.cli.common import open_cache
from fa4build.files import make_scratch, sweep_scratch, write_atomically, write_many
from fa4build.store import cache as module
from fa4build.store import locks
from fa4build.store.cache import Cache, lack_of_rights
from fa4build.store.keys import key_of

OBJECTS = {"cubin": b"\x7fELF cubin", "plan": b"{}", "ptx": b".version 9.4", "log": b"ptxas info"}
KEY = "5" * 64
ROOT = Path(__file__).parents[2]
HOUR = 3600.0

HOLDER = """
import sys, time
from pathlib import Path
from fa4build.store.cache import Cache
with Cache(Path(sys.argv[1])).lock(sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of KEY, killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def put(cache: Cache, number: int) -> str:
    """An entry with a cubin of 1000 bytes of its own. Returns its key."""
    objects = {**OBJECTS, "cubin": number.to_bytes(4, "big") * 250}
    return cache.put(name=f"v{number}", inputs={"number": number}, facts={"registers": 1}, objects=objects).key


def test_prune_takes_no_lock_from_its_holder(tmp_path, holder):
    """Two processes: the lock's file looks a day old, since taking a lock does not touch it."""
    cache = Cache(tmp_path)
    lock, work = tmp_path / "locks" / f"{KEY}.lock", cache.work_dir("v", KEY)
    work.mkdir(parents=True)
    for path in (lock, work):
        os.utime(path, (time.time() - 24 * HOUR,) * 2)
    cache.prune()

    assert (lock.exists(), work.exists()) == (True, True)
    assert cache.try_lock(KEY) is None
    holder.kill()
    holder.wait()
    cache.prune()
    assert (lock.exists(), work.exists()) == (False, False)


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path, monkeypatch):
    """Whoever opened the file before a prune removed it, and locks it after, takes the new file's lock instead."""
    path = tmp_path / "locks" / "k.lock"
    real = locks._open

    def open_and_lose(lock):
        handle = real(lock)
        monkeypatch.setattr(locks, "_open", real)
        lock.unlink()
        return handle

    monkeypatch.setattr(locks, "_open", open_and_lose)
    release = locks.take(path)

    assert path.exists()
    assert locks.take(path) is None
    release()


def test_a_size_limit_holds_after_a_prune_was_killed(tmp_path):
    """Entries gone, objects still there and young: nobody writes, so they are nobody's."""
    cache = Cache(tmp_path)
    for number in range(4):
        put(cache, number)
    for path in (tmp_path / "actions").glob("*.json"):
        path.unlink()
    pruned = cache.prune(max_bytes=500)

    assert (pruned.freed_bytes, cache.size().object_bytes) == (4024, 0)


def test_prune_leaves_objects_of_a_running_writer_alone(tmp_path, monkeypatch):
    """The writer is between an object and its action; an hour later it is not."""
    monkeypatch.setattr(module, "_WRITERS_S", 0.1)
    cache = Cache(tmp_path)
    (tmp_path / "actions" / f"{put(cache, 1)}.json").unlink()
    with cache._writing():
        cache.prune()
        assert cache.size().objects == 4
        cache.prune(now=time.time() + HOUR + 1)
        assert cache.size().objects == 0


def _put_many(root: Path, start: int) -> None:
    for number in range(start, start + 40):
        put(Cache(root), number)


def _prune_often(root: Path) -> None:
    for _ in range(40):
        Cache(root).prune(max_bytes=0)


def test_an_entry_that_is_there_is_whole_beside_prunes(tmp_path):
    """Two writers share three objects of each entry with what a third process removes all the time."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_put_many, args=(tmp_path, start)) for start in (0, 1000)]
    processes.append(fork.Process(target=_prune_often, args=(tmp_path,)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert Cache(tmp_path).verify() == ()


def test_a_directory_where_a_file_belongs_is_named(tmp_path):
    """Instead of ending every command."""
    cache = Cache(tmp_path)
    key = put(cache, 1)
    (tmp_path / "actions" / f"{key}.json").unlink()
    (tmp_path / "actions" / f"{key}.json").mkdir()

    assert cache.entries() == ()
    assert "is a directory" in cache.verify()[0]
    assert cache.prune().kept_entries == 0


@pytest.fixture
def foreign():
    """A store with one entry that user 65534 may read and not write, and a free folder of that user's."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    base = Path(tempfile.mkdtemp(prefix="store-", dir="/tmp"))
    base.chmod(0o755)
    store, own = base / "store", base / "own"
    put(Cache(store), 1)
    record = store / "evidence" / "static" / "ab.json"
    own.mkdir()
    os.chown(own, 65534, 65534)
    yield store, own, record
    shutil.rmtree(base)


def _build_as_another(store: Path, own: Path, told: multiprocessing.Queue) -> None:
    os.setgid(65534)
    os.setuid(65534)
    os.environ.update(XDG_CACHE_HOME=str(own), HOME=str(own), TMPDIR=str(own))
    cache = open_cache(store)
    release = cache.try_lock(KEY)
    there = cache.get(key_of({"number": 1}))
    put(cache, 2)
    release()
    read = cache.read(there, "cubin")
    told.put((cache.root, there.name, read[:4], [entry.name for entry in cache.entries()], lack_of_rights(store)))


def test_what_a_foreign_store_lacks_is_kept_elsewhere(foreign):
    """Its entries serve; nothing in it changes; the user's own cache gets the rest."""
    store, own, _ = foreign
    before = sorted(store.rglob("*"))
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    process = fork.Process(target=_build_as_another, args=(store, own, told))
    process.start()
    root, name, cubin, names, lack = told.get(timeout=60)
    process.join(timeout=60)

    assert (root, name, cubin, names) == (own / "fa4build", "v1", b"\0\0\0\1", ["v1", "v2"])
    assert lack == f"this user may not write {store}"
    assert sorted(store.rglob("*")) == before


def _write_one(path: Path, data: bytes) -> None:
    write_many(path.parent, {path.name: data})


@pytest.mark.parametrize("write", [write_atomically, _write_one])
def test_a_full_disk_is_told_with_path_and_size(tmp_path, monkeypatch, write):
    """And leaves nothing half-written."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match=r"No space left on device: 999 bytes were to be written: '.*/cubin'"):
        write(tmp_path / "cubin", b"x" * 999)

    assert list(tmp_path.iterdir()) == []


def test_scratch_of_the_dead_is_swept_and_of_the_living_is_not(tmp_path, monkeypatch):
    """Locked by its owner; what is not locked goes after a minute, and what older versions made after a day."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, release = make_scratch("server")
    dead, old, young = (
        tmp_path / name for name in ("fa4build-scratch-server-x", "fa4build-abcd_123", "fa4build-zzzzzzzz")
    )
    other = tmp_path / "fa4build-cache-0"
    for path in (dead, old, young, other):
        path.mkdir()
    for path, hours in ((living, 48), (dead, 1), (old, 25), (young, 1), (other, 99)):
        os.utime(path, (time.time() - hours * HOUR,) * 2)

    assert sweep_scratch() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, young.name, other.name])
    release()
    assert not living.exists()
