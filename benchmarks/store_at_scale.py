"""What a store of many entries costs: seconds of one core for prune, list, verify, import and a cached matrix.

    python -m benchmarks.store_at_scale [--entries 100000] [--matrix 400] [--dir DIR] [--json FILE]

Entries are sparse: a cubin, a plan and a PTX of about 70 bytes of their own, an empty log for all; their inputs have
the fields and the size of a real kernel's (8 kB). What grows with the number of entries is measured, not what grows
with the size of kernels. Each operation is a process of its own; `cpu_s` is user and system time of that process, start
included, `wall_s` is by the clock, `load` the machine's average of one minute before. `prune` finds nothing to remove
but one entry in a hundred; `prune half` removes every second one, where most of the time is the file system's.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from fa4build.store.cache import Cache
from fa4build.store.keys import key_of

LIMITS_S = {"list": 30.0, "verify": 60.0, "import": 60.0, "cached matrix": 2.0, "prune": 10.0}
_FILES = tuple((f"kernels_src/part{n:02d}.py", hashlib.sha256(bytes([n])).hexdigest()) for n in range(60))


def inputs_of(number: int) -> dict[str, Any]:
    """Inputs of the size of a real kernel's."""
    return {
        "schema": 1,
        "source": {"text": f"N = {number}\n" + "x = 1\n" * 250, "dependencies": [list(file) for file in _FILES]},
        "tuning": {"number": number},
        "toolchain": {"builder_sha256": "c" * 64},
        "options": {},
    }


def objects_of(number: int) -> dict[str, bytes]:
    """Small objects, all but the log different in every entry."""
    return {name: f"{name} {number:064d}".encode() for name in ("cubin", "plan", "ptx")} | {"log": b""}


BYTES_AN_ENTRY = sum(len(data) for data in objects_of(0).values())


def document_of(number: int) -> tuple[str, bytes, dict[str, bytes]]:
    """Key, action file and objects by digest of one entry, as `Cache.put` makes them."""
    objects = {name: (hashlib.sha256(data).hexdigest(), data) for name, data in objects_of(number).items()}
    inputs = inputs_of(number)
    body = {
        "facts": {"registers": 168, "target": "sm_90a"},
        "inputs": inputs,
        "key": key_of(inputs),
        "name": f"v{number}",
        "objects": {name: {"sha256": sha256, "size": len(data)} for name, (sha256, data) in objects.items()},
    }
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    seal = hashlib.sha256(text.encode()).hexdigest()
    action = f'{{"body":{text},"sha256":"{seal}"}}\n'.encode()
    return body["key"], action, dict(objects.values())


def write_tar(path: Path, entries: int) -> None:
    """An exported cache with so many entries, written as it is made."""
    with tarfile.open(path, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        seen: set[str] = set()
        for number in range(entries):
            key, action, objects = document_of(number)
            names = {f"objects/{digest[:2]}/{digest}": data for digest, data in objects.items()}
            for name, data in {**names, f"actions/{key}.json": action}.items():
                if name not in seen:
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = len(data), 0o444
                    tar.addfile(info, BytesIO(data))
                    if len(data) == 0:
                        seen.add(name)
            tar.members = []  # tarfile keeps all it wrote


def operate(operation: str, root: Path, file: Path, kernels: int) -> int:
    """One operation in this process. Returns how many entries it had to do with."""
    cache = Cache(root)
    if operation == "import":
        return cache.import_tar(file)
    if operation == "list":
        return len(cache.entries())
    if operation == "verify":
        assert cache.verify() == ()
        return cache.size().entries
    if operation == "cached matrix":
        return sum(cache.get(key_of(inputs_of(number))) is not None for number in range(kernels))
    limit = kernels * BYTES_AN_ENTRY * (50 if operation == "prune half" else 99) // 100
    pruned = cache.prune(max_bytes=limit)
    assert pruned.kept_bytes <= limit
    return pruned.removed_entries


def main() -> None:
    """Make the entries, time each operation in a process of its own, print and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--matrix", type=int, default=400, help="kernels of the cached matrix")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--operation", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.operation:
        print(operate(args.operation, args.dir / "store", args.dir / "entries.tar", args.matrix))
        return
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="store-") as directory:
        write_tar(Path(directory) / "entries.tar", args.entries)
        rows = [
            _timed(name, directory, args)
            for name in ("import", "list", "verify", "cached matrix", "prune", "prune half")
        ]
    record = {"entries": args.entries, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _timed(operation: str, directory: str, args: argparse.Namespace) -> dict[str, Any]:
    load, before, started = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "benchmarks.store_at_scale", "--operation", operation, "--dir", directory]
    done = subprocess.run(
        [*command, "--matrix", str(args.entries if operation.startswith("prune") else args.matrix)],
        check=True,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {
        "operation": operation,
        "entries_touched": int(done.stdout),
        "cpu_s": round(cpu, 2),
        "wall_s": round(time.monotonic() - started, 1),
        "limit_s": LIMITS_S.get(operation),
        "load": round(load, 1),
        "peak_mb": after.ru_maxrss // 1024,
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
