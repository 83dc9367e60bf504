"""Gave the committed proofs the digests of `fa4build.verify_identity`, once, in the commit that brought them.

    python evidence/rekey.py OLD_COMMIT CACHE_DIR [--write]

For every row of evidence/*/simulated.json the kernel is taken from a cache that holds what OLD_COMMIT compiles. The
code of OLD_COMMIT computes its digests: cubin, proof and chain must be those of the row. If all rows of a file match,
it is written with the digests of the code here; else what does not match is told. Nothing is simulated, no figure
changes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = """
import json, sys
from pathlib import Path
from fa4build.cache import Cache
from fa4build.families.registry import family_named
from fa4build.pipeline import find_cached
from fa4build.variants import parse_variant
from fa4build import verify

cache, names = Cache(Path(sys.argv[1])), json.load(sys.stdin)
more = {"form_of": verify.PtxForms()} if hasattr(verify, "PtxForms") else {}
options = verify.Options()
run = verify._Run(cache=cache, options=options, tell=print, total=0, family=family_named(), **more)
found = {}
variants = [parse_variant(name) for name in names]
for variant, (_, entry) in zip(variants, find_cached(variants, cache)):
    if entry is not None:
        request = run._request(variant, entry)
        found[variant.id] = [entry.objects["cubin"].sha256, request.sha256, request.chain_sha256]
print(json.dumps(found))
"""


def digests(tree: Path, cache_dir: Path, names: list[str]) -> dict[str, list[str]]:
    """Cubin, proof and chain of every cached kernel, as the code of a tree computes them."""
    command = [sys.executable, "-c", DIGESTS, str(cache_dir)]
    done = subprocess.run(command, cwd=tree, input=json.dumps(names), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the code of {tree} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def old_digests(commit: str, cache_dir: Path, names: list[str]) -> dict[str, list[str]]:
    """The same by the code of a commit."""
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", directory], input=archive, check=True)
        return digests(Path(directory), cache_dir, names)


def rekeyed(rows: dict, old: dict[str, list[str]], new: dict[str, list[str]]) -> tuple[dict, dict[str, list[str]]]:
    """Rows with their new digests, and by what went wrong the rows that are left as they were."""
    result, left = dict(rows), {"not compiled": [], "other cubin": [], "other proof": [], "other chain": []}
    for name, (cubin, summary) in rows.items():
        chain = summary.get("chain_sha256", "")
        if name not in old or name not in new:
            left["not compiled"].append(name)
        elif {old[name][0], new[name][0]} != {cubin}:
            left["other cubin"].append(name)
        elif old[name][1] != summary["proof_sha256"]:
            left["other proof"].append(name)
        elif old[name][2] != chain:
            left["other chain"].append(name)
        else:
            kept = {key: value for key, value in summary.items() if key != "simulator_sha256"}
            kept["proof_sha256"] = new[name][1]
            result[name] = (cubin, {**kept, "chain_sha256": new[name][2]} if chain else kept)
    return result, left


def main(commit: str, cache_dir: Path, writes: bool) -> None:
    """Re-key every file; with `writes` only if all its rows match."""
    from fa4build.evidence import read_simulated, write_simulated

    for path in sorted(ROOT.glob("evidence/*/simulated.json")):
        rows = dict(read_simulated(path))
        names = sorted(rows)
        old, new = old_digests(commit, cache_dir, names), digests(ROOT, cache_dir, names)
        result, left = rekeyed(rows, old, new)
        wrong = sum(map(len, left.values()))
        chains = sum("chain_sha256" in summary for _, summary in rows.values())
        told = ", ".join(f"{why}: {len(found)} ({found[0]}, ...)" for why, found in left.items() if found)
        print(
            f"{path.parent.name}: {len(rows)} rows, {chains} with chains; {len(rows) - wrong} match. {told}", flush=True
        )
        if writes and not wrong:
            write_simulated(path, result)
            print(f"{path.parent.name}: written")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--write" in sys.argv[3:])
