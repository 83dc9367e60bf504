"""Contract of the cache.

The key is formed before compiling, from everything that decides the result, and from nothing else: not from paths, not
from the order of a mapping. An entry is complete or absent, whatever happens to its writer. What is damaged counts as
absent, and `verify` names it. Of N processes that need one key, one compiles. Entries travel between machines whole.
"""

import dataclasses
import enum
import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.render import KernelSource, render
from fa4build.compiling.toolchain import Distribution, Toolchain
from fa4build.errors import CacheCorruptError
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import tuning_for
from fa4build.store.cache import Cache, CacheCorruptWarning
from fa4build.store.entries import StoredObject
from fa4build.store.keys import cache_key, canonical, key_inputs, key_of

VARIANT = Variant(op="fwd", arch="sm90a", dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
SOURCE = KernelSource(
    variant=VARIANT,
    text="TILE_M = 128\n",
    sha256="5" * 64,
    symbol=VARIANT.symbol,
    dependencies=(("kernels_src/forward/sm90.py", "a" * 64),),
)
TUNING = tuning_for(VARIANT)
TOOLCHAIN = Toolchain(
    dsl_version="4.8.1",
    backend="cu13",
    distributions=(Distribution(name="nvidia-cutlass-dsl", version="4.8.1", record_sha256="b" * 64),),
    builder_sha256="c" * 64,
)
OPTIONS = CompileOptions()
INPUTS = {"source": SOURCE, "tuning": TUNING, "toolchain": TOOLCHAIN, "options": OPTIONS}
KEY = cache_key(**INPUTS)

OBJECTS = {"cubin": b"\x7fELF cubin", "plan": b"{}", "ptx": b".version 9.4", "log": b"ptxas info"}
FACTS = {"registers": 168, "symbols": ["k_0"]}


def put(cache: Cache, name: str = "v", *, number: int = 0, objects: dict | None = None):
    """An entry whose key depends on `number`."""
    return cache.put(name=name, inputs={"number": number}, facts=FACTS, objects=objects or OBJECTS)


# --- keys -------------------------------------------------------------------------------------------------------------


def other(value: object) -> object:
    """A different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, ("NAME", "1")) if value else (("NAME", "1"),)
    if dataclasses.is_dataclass(value):
        first = dataclasses.fields(value)[0].name
        return replaced(value, first, other(getattr(value, first)))
    raise TypeError(value)


def replaced(value: object, field: str, new: object) -> object:
    """A copy with one field changed, without the checks of construction: any difference must show in the key."""
    copy = object.__new__(type(value))
    for item in dataclasses.fields(value):
        object.__setattr__(copy, item.name, new if item.name == field else getattr(value, item.name))
    return copy


FIELDS = [
    pytest.param(part, field.name, id=f"{type(value).__name__}.{field.name}")
    for part, value in INPUTS.items()
    for field in dataclasses.fields(value)
]


@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_every_field_of_every_input_perturbs_the_key(part, field):
    """Found by reflection, so a new field cannot be forgotten."""
    value = INPUTS[part]
    changed = {**INPUTS, part: replaced(value, field, other(getattr(value, field)))}

    assert cache_key(**changed) != KEY


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Variant)])
def test_every_axis_perturbs_the_key(field):
    """The variant is part of the key itself, not only through the text rendered from it."""
    changed = replaced(SOURCE, "variant", replaced(VARIANT, field, other(getattr(VARIANT, field))))

    assert cache_key(changed, TUNING, TOOLCHAIN, OPTIONS) != KEY


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Distribution)])
def test_every_fact_about_a_distribution_perturbs_the_key(field):
    """A rebuilt compiler of the same version is another compiler."""
    distribution = TOOLCHAIN.distributions[0]
    changed = replaced(TOOLCHAIN, "distributions", (replaced(distribution, field, "x"),))

    assert cache_key(SOURCE, TUNING, changed, OPTIONS) != KEY


def test_the_schema_version_is_part_of_the_key():
    """A later fa4build that gives an input another meaning finds none of today's entries."""
    inputs = key_inputs(**INPUTS)

    assert key_of({**inputs, "schema": inputs["schema"] + 1}) != KEY


def test_equal_inputs_have_equal_keys():
    """Built anew, and with mappings in another order."""
    again = {**INPUTS, "tuning": dataclasses.replace(TUNING), "source": dataclasses.replace(SOURCE)}

    assert cache_key(**again) == KEY
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_the_key_ignores_where_the_checkout_lies(tmp_path):
    """The same kernel sources at two paths."""
    from fa4build.compiling.render import kernels_source_dir

    keys = set()
    for name in ("one", "another/place"):
        copy = tmp_path / name / "kernels_src"
        copy.parent.mkdir(parents=True)
        subprocess.run(["cp", "-r", str(kernels_source_dir()), str(copy)], check=True)
        keys.add(cache_key(render(VARIANT, TUNING, source_dir=copy), TUNING, TOOLCHAIN, OPTIONS))

    assert len(keys) == 1


@pytest.mark.parametrize(
    ("one", "another"),
    [
        pytest.param(1, True, id="number and truth"),
        pytest.param(1, 1.0, id="integer and float"),
        pytest.param(1, "1", id="number and text"),
        pytest.param(None, "None", id="nothing and text"),
        pytest.param(0.1, 0.1 + 2**-56, id="floats that differ in the last bit"),
        pytest.param(("ab",), ("a", "b"), id="one item and two"),
        pytest.param(0.0, -0.0, id="signed zeros"),
    ],
)
def test_values_that_differ_are_written_differently(one, another):
    """JSON alone would take some of these for the same."""
    assert json.dumps(canonical(one)) != json.dumps(canonical(another))


class Colour(enum.Enum):
    """A value without a canonical form."""

    RED = 1


@pytest.mark.parametrize(
    "value",
    [Path("/x"), {1, 2}, b"x", float("nan"), float("inf"), object(), Colour.RED, {1: 2}, {"$type": 1}, Variant],
    ids=["path", "set", "bytes", "nan", "infinity", "object", "enum", "integer-name", "reserved-name", "class"],
)
def test_what_has_no_canonical_form_is_refused(value):
    """Never `repr`, never a pickle: what cannot be keyed is not cached."""
    with pytest.raises(TypeError, match="cannot be part of a cache key"):
        canonical(value)


# --- entries ----------------------------------------------------------------------------------------------------------


def test_what_was_put_is_got(tmp_path):
    """With its facts, and its objects to the byte."""
    cache = Cache(tmp_path)
    entry = put(cache)

    assert cache.get(key_of({"number": 0})) == entry
    assert {name: cache.read(entry, name) for name in OBJECTS} == OBJECTS
    assert entry.objects["plan"] == StoredObject(sha256=hashlib.sha256(b"{}").hexdigest(), size=2)
    assert (entry.name, entry.facts, entry.inputs) == ("v", FACTS, {"number": 0})


def test_files_lie_where_the_format_says_and_are_read_only(tmp_path):
    """docs/formats.md, section 4."""
    entry = put(Cache(tmp_path))
    digest = entry.objects["cubin"].sha256
    action, blob = tmp_path / "actions" / f"{entry.key}.json", tmp_path / "objects" / digest[:2] / digest

    assert blob.read_bytes() == OBJECTS["cubin"]
    assert [oct(path.stat().st_mode & 0o777) for path in (action, blob)] == ["0o444", "0o444"]


def test_looking_into_a_cache_that_does_not_exist_leaves_no_trace(tmp_path):
    """A dry run on a read-only disk works."""
    cache = Cache(tmp_path / "none")

    assert (cache.get(KEY), cache.entries(), cache.verify(), cache.size().entries) == (None, (), (), 0)
    assert not (tmp_path / "none").exists()


def test_an_entry_needs_all_its_objects(tmp_path):
    """A cubin without a plan would be useless, and noticed late."""
    with pytest.raises(ValueError, match="needed are exactly"):
        put(Cache(tmp_path), objects={"cubin": b"x"})


def damage(path: Path, *, keep_size: bool = True) -> None:
    """Flip the last bit of a file, or cut its last byte."""
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if keep_size else data[:-1])


@pytest.mark.parametrize(
    ("part", "keep_size"),
    [
        ("cubin", True),
        ("plan", True),
        ("cubin", False),
        ("ptx", False),
        ("log", False),
        ("action", True),
        ("action", False),
    ],
)
def test_a_damaged_entry_is_a_miss_with_a_warning_and_verify_names_it(tmp_path, part, keep_size):
    """Then putting it again repairs it."""
    cache = Cache(tmp_path)
    entry = put(cache)
    digest = "" if part == "action" else entry.objects[part].sha256
    action = tmp_path / "actions" / f"{entry.key}.json"
    # The last byte of an action is its newline, which is not part of its value: damage the digest before it.
    path = action if part == "action" else tmp_path / "objects" / digest[:2] / digest
    if part == "action" and keep_size:
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b'"registers":168', b'"registers":169'))
    else:
        damage(path, keep_size=keep_size)
        if part == "action":
            damage(path, keep_size=False)

    with pytest.warns(CacheCorruptWarning, match="damaged"):
        assert cache.get(entry.key) is None
    assert len(cache.verify()) == 1
    assert "damaged" in cache.verify()[0]

    put(cache)
    assert cache.get(entry.key) == entry
    assert cache.verify() == ()


@pytest.mark.parametrize("part", ["ptx", "log"])
def test_damage_that_get_does_not_look_for_is_found_when_read(tmp_path, part):
    """PTX and log are compared with their digests when somebody wants them, and by verify."""
    cache = Cache(tmp_path)
    entry = put(cache)
    digest = entry.objects[part].sha256
    damage(tmp_path / "objects" / digest[:2] / digest)

    with pytest.raises(CacheCorruptError, match=f"its {part} is damaged"):
        cache.read(entry, part)
    assert len(cache.verify()) == 1


def test_a_missing_object_is_a_miss(tmp_path):
    """As if the entry had never been finished."""
    cache = Cache(tmp_path)
    entry = put(cache)
    digest = entry.objects["cubin"].sha256
    (tmp_path / "objects" / digest[:2] / digest).unlink()

    with pytest.warns(CacheCorruptWarning, match="is gone"):
        assert cache.get(entry.key) is None


def test_an_entry_under_another_key_is_a_miss(tmp_path):
    """A file that was renamed or copied by hand."""
    cache = Cache(tmp_path)
    entry = put(cache)
    (tmp_path / "actions" / f"{KEY}.json").write_bytes((tmp_path / "actions" / f"{entry.key}.json").read_bytes())

    with pytest.warns(CacheCorruptWarning, match="another key"):
        assert cache.get(KEY) is None


def test_equal_objects_are_stored_once(tmp_path):
    """Two entries that differ in their cubin alone: 5 objects, not 8."""
    cache = Cache(tmp_path)
    put(cache, number=1)
    put(cache, number=2, objects={**OBJECTS, "cubin": b"other"})

    assert cache.size().objects == 5


# --- several processes ------------------------------------------------------------------------------------------------

PROCESSES = 4


def compile_once(root: Path, compiles: Path, barrier: Barrier) -> None:
    """What a build does for one key, with a compile that takes a while and leaves a line."""
    cache = Cache(root)
    key = key_of({"number": 0})
    barrier.wait()
    with cache.lock(key):
        if cache.get(key) is None:
            with compiles.open("a") as file:
                file.write("compiled\n")
            time.sleep(0.2)
            put(cache)


def test_processes_that_need_one_cold_key_compile_it_once(tmp_path):
    """All start together; the lock is held over the compile."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)
    arguments = (tmp_path / "cache", tmp_path / "compiles", barrier)
    processes = [context.Process(target=compile_once, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)

    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert (tmp_path / "compiles").read_text() == "compiled\n"


def test_a_held_lock_is_not_taken_and_a_released_one_is(tmp_path):
    """The build goes on with another variant instead of waiting."""
    cache = Cache(tmp_path)
    with cache.lock(KEY):
        assert cache.try_lock(KEY) is None
    release = cache.try_lock(KEY)

    assert release is not None
    release()


WRITER = """
import os, signal, sys
from pathlib import Path
import fa4build.files
from fa4build.store.cache import Cache

real, calls = os.fsync, 0

def fsync(descriptor):
    # Killed at the n-th time that bytes should reach the disk.
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)

os.fsync = fsync
cache = Cache(Path(sys.argv[1]))
with cache.lock("0" * 64):
    cache.put(name="v", inputs={"number": 0}, facts={}, objects=dict.fromkeys(("cubin", "plan", "ptx", "log"), b"x"))
"""


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_killed_writer_leaves_no_entry_and_no_lock(tmp_path, step):
    """Four equal objects are one file: file and directory of the object, then of the action. The last kill is too late
    to matter: the rename has happened."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(step)]
    done = subprocess.run(command, check=False, timeout=60, cwd=Path(__file__).parents[2])
    cache = Cache(tmp_path)

    assert done.returncode == -signal.SIGKILL
    assert (cache.get(key_of({"number": 0})) is not None) == (step == 4)
    assert cache.verify() == ()
    assert cache.try_lock("0" * 64) is not None


# --- keeping it small -------------------------------------------------------------------------------------------------

DAY = 86400.0


def aged(cache: Cache, number: int, days: float, now: float) -> str:
    """An entry with a cubin of 1000 bytes of its own, last used so many days ago. Returns its key."""
    objects = {**OBJECTS, "cubin": bytes([number]) * 1000}
    entry = put(cache, f"v{number}", number=number, objects=objects)
    os.utime(cache.root / "actions" / f"{entry.key}.json", (now - days * DAY,) * 2)
    return entry.key


def test_prune_removes_what_was_not_used_for_long(tmp_path):
    """Objects go with the last entry that points to them; shared ones stay."""
    cache, now = Cache(tmp_path), time.time()
    aged(cache, 1, days=40, now=now)
    young = aged(cache, 2, days=3, now=now)
    pruned = cache.prune(max_age_s=30 * DAY, now=now)

    assert [entry.key for entry in cache.entries()] == [young]
    assert (pruned.removed_entries, pruned.freed_bytes, pruned.kept_entries) == (1, 1000, 1)
    assert cache.verify() == ()


def test_prune_by_size_keeps_what_was_used_last(tmp_path):
    """Each entry has 1000 bytes of its own, and 24 bytes are shared by all: 2500 bytes hold two."""
    cache, now = Cache(tmp_path), time.time()
    keys = {days: aged(cache, days, days=days, now=now) for days in (1, 2, 3, 4)}
    cache.prune(max_bytes=2500, now=now)

    assert {entry.key for entry in cache.entries()} == {keys[1], keys[2]}
    assert cache.size().object_bytes <= 2500


def test_what_proofs_keep_beside_is_counted_and_goes_by_age(tmp_path):
    """Forms, libraries and the C compiler's cache; without an age they stay, but for what a killed compile left."""
    cache = Cache(tmp_path)
    now = time.time()
    for name, days in (
        ("forms/ab/old.json", 40),
        ("native/new.so", 1),
        ("zig/o/old", 40),
        ("native/fa4build-native-x/o", 1),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
        for each in (path, path.parent):
            os.utime(each, (now - days * 86400,) * 2)
    assert cache.size().beside == {"forms": 4, "native": 8, "zig": 4}

    cache.prune()
    assert cache.size().beside == {"forms": 4, "native": 4, "zig": 4}
    cache.prune(max_age_s=30 * 86400)
    assert cache.size().beside == {"forms": 0, "native": 4, "zig": 0}


def test_use_is_noted_so_that_prune_keeps_it(tmp_path):
    """A hit makes an entry young again."""
    cache, now = Cache(tmp_path), time.time()
    key = aged(cache, 1, days=40, now=now)
    cache.get(key)
    cache.prune(max_age_s=30 * DAY)

    assert [entry.key for entry in cache.entries()] == [key]


# --- moving it --------------------------------------------------------------------------------------------------------


def test_an_exported_cache_can_be_imported(tmp_path):
    """Equal entries, and equal files for equal entries."""
    cache, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    put(cache, number=1)
    put(cache, number=2, objects={**OBJECTS, "cubin": b"other"})

    assert cache.export_tar(tmp_path / "a.tar") == 2
    assert there.import_tar(tmp_path / "a.tar") == 2
    assert there.entries() == cache.entries()
    assert there.verify() == ()
    there.export_tar(tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_a_part_can_be_exported(tmp_path):
    """With the objects it needs, and no others."""
    cache, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    entry = put(cache, number=1)
    put(cache, number=2, objects={**OBJECTS, "cubin": b"other"})
    cache.export_tar(tmp_path / "a.tar", [entry.key])
    there.import_tar(tmp_path / "a.tar")

    assert there.entries() == (entry,)
    assert there.size().objects == 4


def hostile(path: Path, members: dict[str, bytes]) -> None:
    """A tar file with these members."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


DIGEST = hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"../evil": b"x"}, "no part of an exported cache", id="path out of the cache"),
        pytest.param({"/etc/x": b"x"}, "no part of an exported cache", id="absolute path"),
        pytest.param({f"objects/{DIGEST[:2]}/{DIGEST}": b"y"}, "other contents", id="other bytes"),
        pytest.param({f"actions/{DIGEST}.json": b"{}"}, "damaged", id="no entry"),
    ],
)
def test_a_hostile_import_takes_nothing(tmp_path, members, reason):
    """Everything is checked before anything is written."""
    hostile(tmp_path / "x.tar", members)

    with pytest.raises(CacheCorruptError, match=reason):
        Cache(tmp_path / "cache").import_tar(tmp_path / "x.tar")
    assert not (tmp_path / "cache").exists()


def test_an_import_without_all_objects_takes_nothing(tmp_path):
    """A file that was cut by hand."""
    cache = Cache(tmp_path / "here")
    entry = put(cache)
    action = (tmp_path / "here" / "actions" / f"{entry.key}.json").read_bytes()
    hostile(tmp_path / "x.tar", {f"actions/{entry.key}.json": action})

    with pytest.raises(CacheCorruptError, match="lacks object"):
        Cache(tmp_path / "there").import_tar(tmp_path / "x.tar")


def test_something_else_is_no_import(tmp_path):
    """A message instead of a traceback."""
    (tmp_path / "x.tar").write_bytes(b"not a tar file")

    with pytest.raises(CacheCorruptError, match="no exported cache"):
        Cache(tmp_path / "cache").import_tar(tmp_path / "x.tar")
