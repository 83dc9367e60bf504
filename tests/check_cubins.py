"""Whether the cubins of a cache are those that evidence/ speaks of: the gate for changes that must not change a kernel.

    make check-cubins                  compiles the matrix into build/check-cubins first; about 25 minutes on two cores
    python -m tests.check_cubins DIR   looks at a cache that is there

Prints a line for every kernel that differs, and exits with 1 if any does.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from fa4build.matrix.arch import ARCHES
from fa4build.pipeline import find_cached
from fa4build.shipping.release import EVIDENCE_DIR
from fa4build.store.cache import Cache
from fa4build.store.evidence import SIMULATED_NAME, read_simulated
from fa4build.verify.levels import built_variants


def committed(evidence_dir: Path) -> dict[str, str]:
    """Sha256 of the cubin by kernel id, of every committed proof."""
    paths = sorted(evidence_dir.glob(f"*/{SIMULATED_NAME}"))
    return {name: sha256 for path in paths for name, (sha256, _) in read_simulated(path).items()}


def compiled(cache: Cache) -> dict[str, str | None]:
    """Sha256 of the cubin by kernel id, of every kernel of the matrix; None for what is not in the cache."""
    found = find_cached(built_variants([arch.name for arch in ARCHES], ()), cache)
    return {recipe.name: entry and entry.objects["cubin"].sha256 for recipe, entry in found}


def differences(committed: Mapping[str, str], compiled: Mapping[str, str | None]) -> tuple[str, ...]:
    """A sentence for every kernel whose cubin is not the one that was proven, sorted by id."""
    found = []
    for name in sorted({*committed, *compiled}):
        if name not in committed:
            found.append(f"{name}: evidence/ has no proof of it")
        elif compiled.get(name) is None:
            found.append(f"{name}: not compiled")
        elif compiled[name] != committed[name]:
            found.append(f"{name}: cubin {compiled[name][:16]}, proven is {committed[name][:16]}")
    return tuple(found)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(
            "usage: python -m tests.check_cubins CACHE_DIR, a directory that `fa4build matrix` wrote", file=sys.stderr
        )
        return 2
    proven = committed(EVIDENCE_DIR)
    if not proven:
        print(f"error: {EVIDENCE_DIR} holds no proofs to compare with", file=sys.stderr)
        return 2
    found = differences(proven, compiled(Cache(Path(arguments[0]))))
    print(*found, f"{len(proven)} kernels proven, {len(found)} differ", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
