"""Random mutations of everything that is read back: none is loaded, none is shipped, each is one clear error.

    python -m tests.end_to_end.mutation_campaign [--count 2000] [--bundles 100] [--seed 1] [--json FILE]

Half of them change bytes (flipped, cut, inserted, a stretch doubled). The other half is sealed again by the rules of
its format, with another field of JSON where it has fields, packs and bundles also signed again by a foreign key, as
somebody would who knows the formats and not the key. What comes out must be the original value, or one error of
fa4build's own.
"""

import argparse
import base64
import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa4build.errors import Fa4BuildError
from fa4build.matrix.arch import arch_named
from fa4build.runtime.fa4_kernels.evidence import record_digest
from fa4build.runtime.fa4_kernels.packs import Pack, open_pack
from fa4build.runtime.fa4_kernels.trust import Seal, TrustPolicy
from fa4build.shipping.bundle import write_bundle
from fa4build.shipping.pack import read_pack
from fa4build.shipping.signing import SigningKey, new_key
from fa4build.shipping.wheel import prepare_pack_wheel
from fa4build.store.cache import Cache, CacheCorruptWarning
from fa4build.store.evidence import EvidenceWarning, Subject, read_record, record_path, write_record
from fa4build.store.keys import key_inputs
from fa4build.store.remote_cache import DirectoryStore, RemoteCacheWarning, SharedCache
from tests.artifacts import TOOLCHAIN, made_up_artifact
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan
from tests.summaries import summary

Kind = Callable[[random.Random, Path, bool], str]
"""Mutates once in an empty directory, resealed or not; returns what came of it. Raises: AssertionError."""

CUBIN = made_up_cubin({"fwd_sm90a_0": MadeUpEntry()})
VALUES = {"cubin": CUBIN, "plan": made_up_plan(CUBIN, ["fwd_sm90a_0"]), "ptx": b"ptx" * 40, "log": b"log"}
FACTS = {"target": "sm_90a", "symbols": ["fwd_sm90a_0"], "registers": 168, "spill_bytes": 0, "shared_bytes": 200000}
INPUTS = key_inputs({"symbol": "fwd_sm90a", "variant": {"arch": "sm90a"}}, "tuning", "toolchain", "options")
SUBJECT = Subject(
    kernel="fwd-sm90a-bf16-hd128-causal", cubin_sha256="ab" * 32, plan_sha256="cd" * 32, ptx_sha256="ef" * 32
)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Other bytes than before: flipped, cut, inserted or doubled."""
    place = rng.randrange(len(data) + 1)
    end = min(len(data), place + rng.randrange(1, 40))
    result = rng.choice(
        (
            data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
            if place < len(data)
            else b"",
            data[:place],
            data[:place] + rng.randbytes(end - place or 1) + data[place:],
            data[:end] + data[place:],
        )
    )
    return result if result != data else data + b"\0"


def with_other_field(rng: random.Random, document: Any) -> Any:
    """A copy of a JSON document with one field taken out, or given another value of any type."""
    changed = copy.deepcopy(document)
    place = changed
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8):
            break
        place = place[key]
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice([None, True, -1, 0, 1 << 40, 0.5, "", "x", "silicon", [], {}, ["a"], {"a": 1}])
    return changed


class Campaign:
    """What is mutated, made once: a signed pack wheel and a signed bundle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.key: SigningKey = new_key(root, "release")[2]
        self.foreign: SigningKey = new_key(root, "foreign")[2]
        artifacts = [made_up_artifact(head_dim=dim) for dim in (64, 128)]
        arch = arch_named("sm90")
        prepared = prepare_pack_wheel(artifacts, arch=arch, toolchain=TOOLCHAIN, out_dir=root, sign=self.key)
        self.wheel = prepared.write().path
        self.pack = read_pack(self.wheel)
        self.bundle = write_bundle(root / "bundle", [self.wheel], sign=self.key).path
        cache = Cache(root / "control")
        entry = cache.put(name="fwd-sm90a", inputs=INPUTS, facts=FACTS, objects=VALUES)
        assert self._judged(cache, entry) == "as it was", "what is not mutated is refused"
        self.policy = TrustPolicy(mode="require", keys={self.key.key_id: self.key.public_key}, store="store")

    def wheel_file(self, rng: random.Random, root: Path, _: bool) -> str:
        """The wheel's own bytes."""
        path = root / self.wheel.name
        path.write_bytes(mutated(rng, self.wheel.read_bytes()))
        try:
            assert read_pack(path) == self.pack, "a mutated wheel is read as another pack"
        except Fa4BuildError as error:
            return one_line(error)
        return "as it was"

    def installed_pack(self, rng: random.Random, root: Path, resealed: bool) -> str:
        """A file of a pack on a GPU machine that requires our key."""
        files = dict(self.pack.files())
        name = rng.choice(sorted(files))
        files[name] = mutated(rng, files[name])
        if resealed:
            if rng.random() < 0.5:
                document = with_other_field(rng, json.loads(self.pack.files()["manifest.json"]))
                files["manifest.json"] = json.dumps(document, sort_keys=True).encode()
            digests = {n: hashlib.sha256(files[n]).hexdigest() for n in ("__init__.py", "manifest.json")}
            seal = Seal(files=digests)
            files["seal.txt"] = Seal(files=digests, signatures=(self.foreign.sign(seal.signed),)).text()
        for each, data in files.items():
            (root / each).write_bytes(data)
        opened = open_pack("pack", root, self.policy)
        if isinstance(opened, Pack):
            assert not resealed, "a pack of a foreign key is used"
            try:
                assert read_pack(root) == self.pack, "a mutated pack is read as another one"
            except Fa4BuildError as error:  # a payload is read when its kernel is
                return one_line(error)
            return "as it was"
        return one_line(opened.reason)

    def store_entry(self, rng: random.Random, root: Path, resealed: bool) -> str:
        """A file of the store; sealed again, its body says something else."""
        cache = Cache(root)
        entry = cache.put(name="fwd-sm90a", inputs=INPUTS, facts=FACTS, objects=VALUES)
        action = root / "actions" / f"{entry.key}.json"
        path = (
            action if resealed else rng.choice(sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size))
        )
        data = resealed_action(rng, action.read_bytes()) if resealed else mutated(rng, path.read_bytes())
        path.chmod(0o644)
        path.write_bytes(data)
        return self._judged(cache, entry)

    def remote_answer(self, rng: random.Random, root: Path, resealed: bool) -> str:
        """What a remote cache sends; sealed again, all its digests are right."""
        remote = DirectoryStore(root / "remote")
        entry = SharedCache(root / "a", remote, writes=True).put(
            name="fwd-sm90a", inputs=INPUTS, facts=FACTS, objects=VALUES
        )
        blobs = sorted(p for p in (root / "remote").rglob("*") if p.is_file() and p.stat().st_size)
        if resealed:
            own = Cache(root / "a")
            action = root / "a" / "actions" / f"{entry.key}.json"
            action.chmod(0o644)
            action.write_bytes(resealed_action(rng, action.read_bytes()))
            blobs_of = {name: own.read(entry, name) for name in VALUES} | {"action.json": action.read_bytes()}
            from fa4build.store.remote_cache import action_result

            digests = {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in blobs_of.items()}
            for name, (sha256, _) in digests.items():
                remote.put(f"cas/{sha256}", blobs_of[name])
            remote.put(f"ac/{entry.key}", action_result(digests))
        else:
            path = rng.choice(blobs)
            path.write_bytes(mutated(rng, path.read_bytes()))
        return self._judged(SharedCache(root / "b", remote), entry)

    def _judged(self, cache: Cache, entry: Any) -> str:
        """What a build and a wheel make of the entry."""
        from fa4build.store.kernel_check import check_kernel, claim_of_entry

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = cache.get(entry.key)
        told = [
            str(each.message) for each in told if issubclass(each.category, (CacheCorruptWarning, RemoteCacheWarning))
        ]
        if found is None:
            if isinstance(cache, SharedCache) and not told:
                return "a miss"  # an action that names a blob which is not there, as after an eviction
            assert told, "absent, and nobody is told"
            return one_line(told[0])
        try:
            objects = {name: cache.read(found, name) for name in VALUES}
            claim = claim_of_entry(found.name, found.inputs, found.facts)
            check_kernel(claim, objects["cubin"], objects["plan"], remedy="x")
        except Fa4BuildError as error:
            return one_line(error)
        assert {name: objects[name] for name in VALUES} == VALUES, "an entry is used with other objects"
        assert found.inputs == entry.inputs, "an entry is used with other inputs"
        return "as it was"

    def evidence(self, rng: random.Random, root: Path, resealed: bool) -> str:
        """A simulated record; sealed again, its digest is right and it is of a form that `verify` never writes."""
        write_record(root, "simulated", SUBJECT, summary("simulated"))
        path = record_path(root, "simulated", SUBJECT.cubin_sha256)
        data = path.read_bytes()
        document = with_other_field(rng, json.loads(data))
        if resealed:
            try:
                digests = (document["subject"]["cubin_sha256"], document["subject"]["plan_sha256"])
                document["record"] = record_digest(
                    document["level"], document["subject"]["kernel"], *digests, document["summary"]
                )
            except (KeyError, TypeError, AttributeError):
                pass
        path.write_bytes(json.dumps(document).encode() if resealed else mutated(rng, data))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = read_record(root, "simulated", SUBJECT)
        if found is None:
            assert [each for each in told if each.category is EvidenceWarning], "ignored, and nobody is told"
            return one_line(str(told[0].message))
        if found != summary("simulated"):
            assert resealed, "a mutated record counts"
            return "forged"  # right in every form: what a digest cannot show, and a signature can
        return "as it was"

    def bundle_file(self, rng: random.Random, root: Path, resealed: bool) -> str:
        """A file of a bundle, index and requirements among them, checked as its README says, with our key."""
        out = root / "bundle"
        shutil.copytree(self.bundle, out)
        sums = out / "SHA256SUMS"
        files = sorted(p for p in out.rglob("*") if p.is_file() and p.stat().st_size)
        files = [p for p in files if p.name != "verify.sh" and "tools" not in p.parts]  # the check itself
        path = rng.choice(files if not resealed else [p for p in files if not p.name.startswith("SHA256SUMS")])
        path.write_bytes(mutated(rng, path.read_bytes()))
        if resealed:
            names = [line.split("  ", 1)[1] for line in sums.read_text().splitlines()]
            sums.write_text("".join(f"{hashlib.sha256((out / n).read_bytes()).hexdigest()}  {n}\n" for n in names))
            signature = self.foreign.sign(sums.read_bytes())
            value = base64.b64encode(signature.value).decode()
            (out / "SHA256SUMS.sig").write_text(f"signature {signature.key_id} {value}\n")
        command = ["sh", str(out / "verify.sh"), "--key", str(self.root / "release.pub")]
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        text = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode != 0, f"a bundle with another {path.relative_to(out)} is whole"
        assert "Traceback" not in text, text
        return "refused"


def resealed_action(rng: random.Random, data: bytes) -> bytes:
    """An action file with another body and the digest of that."""
    body = with_other_field(rng, json.loads(data)["body"])
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f'{{"body":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def one_line(error: object) -> str:
    """`refused`, once the message is one line of text. Raises: AssertionError."""
    text = str(error)
    assert text.strip(), "an empty message"
    assert "Traceback" not in text, text
    return "refused"


def campaign(count: int, bundles: int, seed: int = 1) -> dict[str, dict[str, int]]:
    """Mutate `count` times, all kinds in turn, and `bundles` times a bundle. Returns what came of each kind."""
    rng = random.Random(seed)
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        made = Campaign(Path(directory))
        kinds: list[Kind] = [made.wheel_file, made.installed_pack, made.store_entry, made.remote_answer, made.evidence]
        chosen = [kinds[number % len(kinds)] for number in range(count)] + [made.bundle_file] * bundles
        for number, kind in enumerate(chosen):
            with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
                try:
                    end = kind(rng, Path(scratch), number // len(kinds) % 2 == 1)
                except BaseException as error:
                    raise AssertionError(f"mutation {number} ({kind.__name__}): {error!r}") from error
                found.setdefault(kind.__name__, Counter())[end] += 1
    return {name: dict(counts) for name, counts in found.items()}


def main() -> None:
    """Print the figures, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--bundles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()[0]
    rows = campaign(args.count, args.bundles, args.seed)
    record = {"count": args.count + args.bundles, "seed": args.seed, "kinds": rows}
    record |= {"seconds": round(time.monotonic() - started), "date": time.strftime("%Y-%m-%d"), "load": round(load, 1)}
    print(json.dumps(record, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
