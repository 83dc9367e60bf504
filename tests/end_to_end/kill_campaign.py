"""SIGKILL at random moments of everything that writes: nothing is lost, and a rerun gives equal bytes.

    python -m tests.end_to_end.kill_campaign [--count 950] [--seed 1] [--json FILE]

Each operation runs in a forked child, which is killed after a random part of the time that it takes undisturbed. The
compiler is a stand-in that gives a made-up cubin at once; locks, files and everything that reads them are real.

After each kill: the store has no damaged entry, no lock is held, what was there before is there, no file is half
written; then the same operation runs to its end, and its result is compared byte for byte with an undisturbed one.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa4build.matrix.arch import arch_named
from fa4build.pipeline import Build
from fa4build.shipping.bundle import write_bundle
from fa4build.shipping.pack import read_pack
from fa4build.shipping.wheel import prepare_pack_wheel
from fa4build.store.cache import Cache
from fa4build.store.keys import key_of
from fa4build.store.remote_cache import DirectoryStore, SharedCache, read_action_result
from tests.artifacts import TOOLCHAIN, made_up_artifact
from tests.test_pipeline import VARIANTS, ScriptedExecutor, recipe_of

ENTRIES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What is killed.

    Attributes:
        prepare: makes a fresh directory ready.
        run: what is killed, and what is run again.
        check: raises AssertionError if a kill has left something wrong.
        result: digest of what a finished run leaves.
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    check: Callable[[Path], None]
    result: Callable[[Path], str]


def put(cache: Cache, number: int) -> None:
    """One of ENTRIES, with objects of its own and shared ones."""
    objects = {"cubin": number.to_bytes(2, "big") * 400, "plan": b"{}", "ptx": b"ptx" * number, "log": b""}
    cache.put(name=f"v{number}", inputs={"number": number}, facts={"registers": 1}, objects=objects)


def _nothing(root: Path) -> None:
    pass


def _matrix(root: Path) -> None:
    build = Build(cache=Cache(root / "store"), executor=ScriptedExecutor(), total=len(VARIANTS))
    assert build.run(VARIANTS, recipe_of).exit_code == 0


def _is_whole(root: Path) -> None:
    cache = Cache(root / "store")
    assert cache.verify() == ()
    for lock in (root / "store" / "locks").glob("*.lock"):
        release = cache.try_lock(lock.stem)
        assert release is not None, f"{lock} is held by nobody"
        release()


def _exported(root: Path) -> str:
    Cache(root / "store").export_tar(root / "all.tar")
    return hashlib.sha256((root / "all.tar").read_bytes()).hexdigest()


def _fill(root: Path) -> None:
    for number in range(ENTRIES):
        put(Cache(root / "store"), number)


def _make_export(root: Path) -> None:
    _fill(root)
    _exported(root)
    shutil.rmtree(root / "store")
    (root / "all.tar").rename(root / "in.tar")


def _import(root: Path) -> None:
    Cache(root / "store").import_tar(root / "in.tar")


LIMIT = 8000


def _fill_by_age(root: Path) -> None:
    """Last uses a day apart, so that each run keeps the same ones."""
    _fill(root)
    for number in range(ENTRIES):
        path = root / "store" / "actions" / f"{key_of({'number': number})}.json"
        os.utime(path, (1e9 + number * 86400,) * 2)


def _prune(root: Path) -> None:
    assert Cache(root / "store").prune(max_bytes=LIMIT).kept_bytes <= LIMIT


def _pruned(root: Path) -> str:
    assert Cache(root / "store").size().object_bytes <= LIMIT
    return _exported(root)


def _keeps_the_newest(root: Path) -> None:
    """What the limit keeps was never touched."""
    _is_whole(root)
    assert Cache(root / "store").get(key_of({"number": ENTRIES - 1})) is not None


def _send(root: Path) -> None:
    shutil.rmtree(root / "store", ignore_errors=True)
    cache = SharedCache(root / "store", DirectoryStore(root / "remote"), writes=True)
    for number in range(8):
        put(cache, number)


def _remote_is_whole(root: Path) -> None:
    """Every action that a reader finds has its blobs, and every blob is what its name says."""
    for path in (root / "remote").rglob("*"):
        if path.is_file() and path.parent.name == "cas" and not path.name.startswith("."):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    blobs = {path.name for path in (root / "remote" / "cas").glob("[0-9a-f]*")}
    for path in (root / "remote" / "ac").glob("[0-9a-f]*"):
        assert {digest for digest, _ in read_action_result(path.read_bytes()).values()} <= blobs


def _remote_digest(root: Path) -> str:
    return _tree(root / "remote")


def _tree(folder: Path) -> str:
    """Digest of names and contents, without temporary files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _wheel(root: Path) -> None:
    artifacts = [made_up_artifact(head_dim=dim) for dim in (64, 128, 256)]
    out = root / "dist"
    prepare_pack_wheel(artifacts, arch=arch_named("sm90"), toolchain=TOOLCHAIN, out_dir=out).write()


def _wheels_are_whole(root: Path) -> None:
    for path in (root / "dist").glob("*.whl"):
        read_pack(path)


def _bundle(root: Path) -> None:
    write_bundle(root / "bundle", sorted((root / "dist").glob("*.whl")))


def _make_bundle(root: Path) -> None:
    """There is one already, which a new one replaces."""
    _wheel(root)
    _bundle(root)


def _bundle_is_whole(root: Path) -> None:
    command = ["sh", str(root / "bundle" / "verify.sh")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


OPERATIONS = {
    "matrix": Operation(prepare=_nothing, run=_matrix, check=_is_whole, result=_exported),
    "import": Operation(prepare=_make_export, run=_import, check=_is_whole, result=_exported),
    "prune": Operation(prepare=_fill_by_age, run=_prune, check=_keeps_the_newest, result=_pruned),
    "remote write": Operation(prepare=_nothing, run=_send, check=_remote_is_whole, result=_remote_digest),
    "wheel": Operation(prepare=_nothing, run=_wheel, check=_wheels_are_whole, result=lambda root: _tree(root / "dist")),
    "bundle": Operation(
        prepare=_make_bundle, run=_bundle, check=_bundle_is_whole, result=lambda root: _tree(root / "bundle")
    ),
}


def in_child(run: Callable[[Path], None], root: Path, kill_after: float | None) -> bool:
    """Run in a forked child, and kill it after so many seconds. Returns whether it was killed before its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(root)
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"it ended with {code} by itself"
    return code != 0


def campaign(count: int, seed: int = 1, names: Sequence[str] = tuple(OPERATIONS)) -> dict[str, dict[str, float]]:
    """Kill `count` times, all operations in turn. Raises: AssertionError at the first fault.

    Returns: for each operation how often it was killed, and how often that was before its end.
    """
    rng = random.Random(seed)
    tried, killed = Counter(), Counter()
    known: dict[str, tuple[str, float]] = {}
    for number in range(count):
        name = names[number % len(names)]
        operation = OPERATIONS[name]
        if name not in known:
            known[name] = undisturbed(operation)
        wanted, seconds = known[name]
        with tempfile.TemporaryDirectory(prefix="kill-") as directory:
            root = Path(directory)
            operation.prepare(root)
            killed[name] += in_child(operation.run, root, rng.uniform(0, seconds))
            tried[name] += 1
            operation.check(root)
            assert not in_child(operation.run, root, None)
            operation.check(root)
            assert operation.result(root) == wanted, f"{name}, kill {number}: the rerun has other bytes"
    return {name: {"kills": tried[name], "before_the_end": killed[name]} for name in names}


def undisturbed(operation: Operation) -> tuple[str, float]:
    """Result of a run that nobody kills, and how long the shortest of three takes: the first one fills caches."""
    runs = []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="kill-") as directory:
            root = Path(directory)
            operation.prepare(root)
            started = time.monotonic()
            in_child(operation.run, root, None)
            runs.append((time.monotonic() - started, operation.result(root)))
    assert len({result for _, result in runs}) == 1
    return runs[0][1], min(seconds for seconds, _ in runs)


def main() -> None:
    """Print the figures, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=950)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", choices=OPERATIONS, action="append", help="these operations. Repeatable; default: all"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()[0]
    rows = campaign(args.count, args.seed, args.only or tuple(OPERATIONS))
    record = {"count": args.count, "seed": args.seed, "operations": rows, "seconds": round(time.monotonic() - started)}
    record |= {"date": time.strftime("%Y-%m-%d"), "load": round(load, 1)}
    print(json.dumps(record, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
