"""Proves that a bundle is whole, and that it installs. Travels inside the bundle; needs the standard library alone.

Beside this module a bundle has `trust.py`, `ed25519.py` and `errors.py`, the same files that the runtime checks packs
with. Run it through the bundle's verify.sh.
"""

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMS_FILE = "SHA256SUMS"
SIGNATURE_FILE = "SHA256SUMS.sig"
SIGNED_PREFIX = b"fa4-kernels bundle 1\n"
_CHUNK_BYTES = 1 << 20


class BundleDamaged(Exception):
    """What is wrong with a bundle, for a person."""


def main(arguments: list[str] | None = None) -> int:
    """Check the bundle that is named; the exit status: 0 if everything holds, 1 if not."""
    parser = argparse.ArgumentParser(prog="verify.sh", description="Check this bundle, byte for byte.")
    parser.add_argument("root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--key", type=Path, action="append", default=[], help="public key that must have signed")
    parser.add_argument("--install", action="store_true", help="also install into a scratch directory, without network")
    options = parser.parse_args(arguments)
    try:
        for line in check_bundle(options.root, options.key):
            print(f"ok: {line}")
        if options.install:
            try_install(options.root)
    except BundleDamaged as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print("The bundle is whole.")
    if not options.key:
        is_signed = (options.root / SIGNATURE_FILE).exists()
        signed = "its signature was not" if is_signed else "it is not signed, nothing was"
        print(f"Who made it: {signed} checked. --key maker.pub checks it against a key that you have from its maker.")
    return 0


def check_bundle(root: Path, key_files: list[Path]) -> list[str]:
    """What was proven, one line each. Raises: BundleDamaged at the first thing that does not hold."""
    keys = _public_keys(key_files)
    sums = _check_sums(root)
    proven = [f"{len(sums)} files, and no other, with the digests of {SUMS_FILE}"]
    if keys:
        proven.append(f"{SUMS_FILE} signed by {_check_signature(root, keys)}")
    wheels = sorted(path for path in (root / "wheels").iterdir() if path.suffix == ".whl")
    locked = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", (root / "requirements.txt").read_text()))
    if locked != {sums[f"wheels/{path.name}"] for path in wheels}:
        raise BundleDamaged("requirements.txt and wheels/ do not hold the same wheels")
    for path in wheels:
        proven.append(f"{path.name}: {_check_wheel(path, keys)}")
    return proven


def _public_keys(files: list[Path]) -> dict[str, bytes]:
    from .trust import key_id, public_key_from_pem

    keys = {}
    for path in files:
        try:
            public_key = public_key_from_pem(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise BundleDamaged(f"--key {path}: {error}") from error
        keys[key_id(public_key)] = public_key
    return keys


def _check_sums(root: Path) -> dict[str, str]:
    """Path -> sha256 of every file; the listing and the directory agree both ways."""
    try:
        text = (root / SUMS_FILE).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleDamaged(f"{SUMS_FILE} cannot be read: {error}") from error
    sums: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.+!/-]+)", line)
        if match is None or ".." in match[2].split("/") or match[2].startswith("/") or match[2] in sums:
            raise BundleDamaged(f"{SUMS_FILE} has a line that is none: {line!r}")
        sums[match[2]] = match[1]
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    present -= {SUMS_FILE, SIGNATURE_FILE}
    for name in sorted(present ^ sums.keys()):
        raise BundleDamaged(f"{name} is {'not listed in ' + SUMS_FILE if name in present else 'missing'}")
    for name, digest in sums.items():
        if (root / name).is_symlink() or _file_sha256(root / name) != digest:
            raise BundleDamaged(f"{name} differs from {SUMS_FILE}; copy the bundle again")
    return sums


def _check_signature(root: Path, keys: Mapping[str, bytes]) -> str:
    """The id of the key that signed the listing of digests."""
    from .ed25519 import verify

    try:
        text = (root / SIGNATURE_FILE).read_bytes().decode("ascii", errors="replace")
    except OSError as error:
        raise BundleDamaged(f"the bundle is not signed: {error}") from error
    match = re.fullmatch(r"signature ([0-9a-f]{16}) ([A-Za-z0-9+/]{86}==)\n", text)
    if match is None:
        raise BundleDamaged(f"{SIGNATURE_FILE} is damaged")
    if match[1] not in keys:
        raise BundleDamaged(f"the bundle is signed by key {match[1]}, not by {', '.join(sorted(keys))}")
    message = SIGNED_PREFIX + (root / SUMS_FILE).read_bytes()
    if not verify(keys[match[1]], message, base64.b64decode(match[2])):
        raise BundleDamaged(f"the signature by key {match[1]} is wrong: the bundle was changed after signing")
    return match[1]


def _check_wheel(path: Path, keys: Mapping[str, bytes]) -> str:
    """RECORD and contents agree both ways; a pack is proven to each stored group."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            (record,) = [name for name in names if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
            rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
            if sorted(rows) != sorted(names):
                raise BundleDamaged(f"{path.name}: RECORD lists other files than are there")
            for name in names:
                if name != record and not _matches(archive, name, rows[name]):
                    raise BundleDamaged(f"{path.name}: {name} differs from RECORD")
            packs = [name.rpartition("/")[0] for name in names if re.fullmatch(r"[a-z0-9_]+/seal\.txt", name)]
            if packs and "fa4_kernels" not in {name.split("/")[0] for name in names}:  # that one is the single file
                _check_data_only(archive, names, packs, path.name)
            kernels = [_check_pack(archive, package, keys, path.name) for package in packs]
    except (zipfile.BadZipFile, OSError, ValueError, KeyError) as error:
        raise BundleDamaged(f"{path.name}: {error}") from error
    return f"{len(names)} files" + (f", {sum(kernels)} kernels" if kernels else "")


def _check_data_only(archive: zipfile.ZipFile, names: list[str], packs: list[str], origin: str) -> None:
    """A pack wheel is a pack and what describes it: Python runs nothing of it when it starts, pip makes no command."""
    (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    for name in names:
        if name.split("/")[0] not in {info, *packs}:
            raise BundleDamaged(f"{origin}: {name} is no part of its pack")
    points = f"{info}/entry_points.txt"
    groups = re.findall(r"^\[(.*)\]$", archive.read(points).decode() if points in names else "", re.MULTILINE)
    if groups != ["fa4_kernels.packs"]:
        raise BundleDamaged(f"{origin}: announces {', '.join(groups) or 'nothing'}, not its pack alone")


def _matches(archive: zipfile.ZipFile, name: str, expected: str) -> bool:
    """Whether a member has the digest that RECORD gives, as `sha256=<base64>`."""
    algorithm, _, digest = expected.partition("=")
    value = hashlib.new(algorithm)
    with archive.open(name) as member:
        while chunk := member.read(_CHUNK_BYTES):
            value.update(chunk)
    return base64.urlsafe_b64encode(value.digest()).rstrip(b"=").decode() == digest


def _check_pack(archive: zipfile.ZipFile, package: str, keys: Mapping[str, bytes], origin: str) -> int:
    """Seal, signature if keys are given, and the digests of the groups; how many kernels there are."""
    from .errors import PackError
    from .trust import SEAL_FILE, SEALED_FILES, TrustPolicy, check_sealed, read_seal

    files = {name: archive.read(f"{package}/{name}") for name in SEALED_FILES}
    try:
        seal = read_seal(archive.read(f"{package}/{SEAL_FILE}"))
        check_sealed(seal, files)
    except PackError as error:
        raise BundleDamaged(f"{origin}: {error}") from error
    refusal = TrustPolicy(mode="require" if keys else "off", keys=keys, store="--key").refusal(seal)
    if refusal is not None:
        raise BundleDamaged(f"{origin}: {refusal}")
    manifest: dict[str, Any] = json.loads(files["manifest.json"])
    for group in manifest["groups"]:
        if hashlib.sha256(archive.read(f"{package}/{group['file']}")).hexdigest() != group["sha256"]:
            raise BundleDamaged(f"{origin}: {group['file']} differs from its manifest")
    return len(manifest["entries"])


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# --- a trial installation ---------------------------------------------------------------------------------------------

_PROBE = """
import sys
from fa4_kernels import _launcher
from fa4_kernels.packs import PackReader, Pack, installed_packs
reader, kernels = PackReader(), 0
for pack in installed_packs():
    if not isinstance(pack, Pack):
        sys.exit(f"pack {pack.name} is refused: {pack.reason}")
    kernels += len([reader.read(pack, entry) for entry in pack.manifest.entries])
print(f"{kernels} kernels of {len(installed_packs())} packs read back, launcher loaded")
"""


def try_install(root: Path) -> None:
    """Install into a scratch directory in a network namespace without a route, where the system allows one; import,
    read every kernel, and show what `doctor` says. Raises: BundleDamaged if that fails."""
    with tempfile.TemporaryDirectory(prefix="fa4-kernels-trial-") as directory:
        isolated = _isolation()
        print(f"ok: trial installation {'in a network namespace' if isolated else 'with pip kept off the network'}")
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": directory, "PIP_CONFIG_FILE": os.devnull}
        environment["PYTHONPATH"] = f"{directory}/site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--require-hashes"]
        pip += ["--disable-pip-version-check", "--find-links", str(root / "wheels")]
        pip += ["--target", f"{directory}/site", "--requirement", str(root / "requirements.txt")]
        _run([*isolated, *pip], environment)
        print("ok: " + _run([*isolated, sys.executable, "-c", _PROBE], environment).strip())
        doctor = [*isolated, sys.executable, "-m", "fa4_kernels", "doctor"]
        done = subprocess.run(doctor, env=environment, capture_output=True, text=True)
        print("fa4_kernels doctor says:\n" + "".join(f"  {line}\n" for line in done.stdout.splitlines()), end="")


def _isolation() -> list[str]:
    """The command that runs another one without a network; empty where there is none, or it is not permitted."""
    unshare = shutil.which("unshare")
    command = [unshare, "--map-root-user", "--net"] if unshare else []
    if command and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        return command
    return []


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode != 0:
        raise BundleDamaged(f"trial installation: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
