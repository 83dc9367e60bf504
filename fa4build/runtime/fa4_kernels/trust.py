"""Seals and trust: whether a pack is as it was made, and whether someone the operator trusts made it.

A seal is a small text file beside the manifest. It names the sha256 of every file that the manifest does not cover,
then signatures, then the sha256 of its own text, so that any changed byte of a pack is noticed, signed or not:

    fa4-kernels seal 1
    <sha256>  __init__.py
    <sha256>  manifest.json
    signature <key id> <base64, 64 bytes>
    seal <sha256 of all lines above>

A signature is Ed25519 over the lines before the first signature. Nothing here needs a network, a clock or a library.
"""

import base64
import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .ed25519 import PUBLIC_KEY_BYTES, verify
from .errors import PackError, TrustError

SEAL_FILE = "seal.txt"
SEALED_FILES = ("__init__.py", "manifest.json")
TRUST_MODES = ("off", "warn", "require")
DEFAULT_STORE = "/etc/fa4-kernels/trust"
VARIABLES = ("FA4_KERNELS_TRUST", "FA4_KERNELS_TRUST_STORE", "FA4_KERNELS_TRUST_KEY")
PUBLIC_KEY_SUFFIX, REVOKED_SUFFIX = ".pub", ".revoked"

_HEADER = "fa4-kernels seal 1"
_SEAL = re.compile(
    rf"(?P<head>{_HEADER}\n(?P<files>(?:[0-9a-f]{{64}}  [A-Za-z0-9_.]+\n)+))"
    r"(?P<signatures>(?:signature [0-9a-f]{16} [A-Za-z0-9+/]{86}==\n)*)"
    r"seal (?P<sha256>[0-9a-f]{64})\n"
)
# DER of a SubjectPublicKeyInfo with an Ed25519 key (RFC 8410): this prefix, then the 32 bytes of the key.
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s+-----END PUBLIC KEY-----\s*")


class TrustWarning(UserWarning):
    """A pack is used although it is not signed by a trusted key, because the operator chose `warn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Who signed, and the 64 bytes."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """`files`: name -> sha256 (hex) of what the manifest does not cover, the manifest among them."""

    files: Mapping[str, str]
    signatures: tuple[Signature, ...] = ()

    @property
    def signed(self) -> bytes:
        """What signatures are over."""
        lines = (f"{digest}  {name}\n" for name, digest in sorted(self.files.items()))
        return f"{_HEADER}\n{''.join(lines)}".encode()

    def text(self) -> bytes:
        """The seal as a file."""
        ordered = sorted(self.signatures, key=lambda signature: signature.key_id)
        lines = (f"signature {s.key_id} {base64.b64encode(s.value).decode()}\n" for s in ordered)
        above = self.signed + "".join(lines).encode()
        return above + f"seal {hashlib.sha256(above).hexdigest()}\n".encode()


def read_seal(text: bytes) -> Seal:
    """The seal in `text`. Raises: PackError unless every byte is as it was written."""
    match = _SEAL.fullmatch(text.decode("ascii", errors="replace"))
    if match is None:
        raise PackError(f"its {SEAL_FILE} is damaged, or newer than this fa4-kernels reads; install the pack again")
    lines = (line.split("  ") for line in match["files"].splitlines())
    marks = (line.split(" ") for line in match["signatures"].splitlines())
    seal = Seal(
        files={name: digest for digest, name in lines},
        signatures=tuple(Signature(key_id=key_id, value=base64.b64decode(value)) for _, key_id, value in marks),
    )
    if seal.text() != text:
        raise PackError(f"its {SEAL_FILE} is damaged: it does not match its own sha256; install the pack again")
    return seal


def check_sealed(seal: Seal, files: Mapping[str, bytes]) -> None:
    """Raises: PackError unless exactly these files are sealed and each is as it was."""
    if seal.files.keys() != files.keys():
        raise PackError(f"its {SEAL_FILE} covers {', '.join(seal.files)}, not {', '.join(files)}; install it again")
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != seal.files[name]:
            what = "manifest" if name == "manifest.json" else name
            raise PackError(f"its {what} is damaged: its sha256 is not that of the seal; install the pack again")


def key_id(public_key: bytes) -> str:
    """How a key is called: the first 16 hexadecimal digits of its sha256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def public_key_from_pem(text: str) -> bytes:
    """The 32 bytes of an Ed25519 public key, as `openssl pkey -pubout` and `fa4build key new` write it.

    Raises: ValueError for anything else.
    """
    match = _PEM.fullmatch(text)
    der = base64.b64decode("".join(match[1].split()), validate=True) if match else b""
    if not der.startswith(_SPKI_PREFIX) or len(der) != len(_SPKI_PREFIX) + PUBLIC_KEY_BYTES:
        raise ValueError("no Ed25519 public key in PEM form")
    return der.removeprefix(_SPKI_PREFIX)


def public_key_to_pem(public_key: bytes) -> str:
    """The inverse of `public_key_from_pem`."""
    body = base64.b64encode(_SPKI_PREFIX + public_key).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustPolicy:
    """What the operator asks of packs.

    `keys`: key id -> public key, those that are trusted; `revoked`: key ids, `store`: both for messages.
    """

    mode: str = "off"
    keys: Mapping[str, bytes]
    revoked: frozenset[str] = frozenset()
    store: str = DEFAULT_STORE

    def refusal(self, seal: Seal) -> str | None:
        """Why a pack with this seal may not be used, None if it may. In mode `warn`, the reason becomes a warning."""
        if self.mode == "off":
            return None
        reason = self._distrust(seal)
        if reason is not None and self.mode == "warn":
            warnings.warn(f"a pack is used although {reason}", TrustWarning, stacklevel=4)
            return None
        return reason

    def _distrust(self, seal: Seal) -> str | None:
        signers = ", ".join(s.key_id for s in seal.signatures) or "nobody"
        for signature in seal.signatures:
            public_key = self.keys.get(signature.key_id)
            if public_key is not None:
                if verify(public_key, seal.signed, signature.value):
                    return None
                return f"its signature by key {signature.key_id} is wrong: it was changed after signing"
        trusted = ", ".join(sorted(self.keys)) or "none"
        if gone := sorted(self.revoked.intersection(s.key_id for s in seal.signatures)):
            return f"it is signed by {signers}, and key {', '.join(gone)} is revoked in {self.store}"
        return (
            f"it is signed by {signers}, and trusted are the keys in {self.store}: {trusted}. Install a pack signed by "
            f"one of them, or have the operator add the signer's {PUBLIC_KEY_SUFFIX} file there"
        )


NO_TRUST = TrustPolicy(mode="off", keys={})
"""Packs are checked for damage, and not for who made them."""


def trust_policy(mode: str | None = None, store: str | None = None, key: str | None = None) -> TrustPolicy:
    """The policy of FA4_KERNELS_TRUST, FA4_KERNELS_TRUST_STORE and FA4_KERNELS_TRUST_KEY.

    Whoever has put a key anywhere wants signatures: without a mode, one known key means `require`.

    Args:
        mode: off, warn or require; None or empty: require if a store or a key is named, or the default store holds a
            key; else off.
        store: directory of public keys (`*.pub`, PEM) and lists of revoked ones (`*.revoked`, a key id a line); None
            or empty: DEFAULT_STORE, or no directory if a key is named.
        key: one more key, as the line of base64 in its `.pub` file.
    Raises: TrustError for an unknown mode, for what is no key, and for a store that cannot be read or does not exist
        although it was named: half a store trusts nobody.
    """
    if mode and mode not in TRUST_MODES:
        raise TrustError(f"FA4_KERNELS_TRUST={mode}: unknown. Allowed: {', '.join(TRUST_MODES)}.")
    if mode == "off":
        return NO_TRUST
    directory = None if key and not store else Path(store or DEFAULT_STORE)
    keys = {} if directory is None else _keys_in(directory, is_named=bool(store))
    if key:
        pinned = _pinned_key(key)
        keys[key_id(pinned)] = pinned
    if not mode and not store and not keys:
        return NO_TRUST
    revoked = frozenset[str]() if directory is None else _revoked_in(directory)
    trusted = {name: value for name, value in keys.items() if name not in revoked}
    where = str(directory) if directory is not None else "FA4_KERNELS_TRUST_KEY"
    return TrustPolicy(mode=mode or "require", keys=trusted, revoked=revoked, store=where)


def _keys_in(directory: Path, *, is_named: bool) -> dict[str, bytes]:
    """Key id -> public key of a store."""
    keys: dict[str, bytes] = {}
    for path in _store_files(directory, PUBLIC_KEY_SUFFIX, is_named=is_named):
        try:
            public_key = public_key_from_pem(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise TrustError(
                f"trust store: {path}: {error}. Remove the file, or replace it by a public key."
            ) from error
        keys[key_id(public_key)] = public_key
    return keys


def _revoked_in(directory: Path) -> frozenset[str]:
    """The ids of keys that this store trusts no longer, whoever adds them again."""
    found: set[str] = set()
    for path in _store_files(directory, REVOKED_SUFFIX, is_named=False):
        try:
            lines = path.read_text(encoding="ascii").split("\n")
        except (OSError, ValueError) as error:
            raise TrustError(f"trust store: {path}: {error}. Write one key id a line.") from error
        for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
            if not re.fullmatch(r"[0-9a-f]{16}", line):
                raise TrustError(
                    f"trust store: {path}: {line!r} is no key id (16 hexadecimal digits). Correct the line."
                )
            found.add(line)
    return frozenset(found)


def _store_files(directory: Path, suffix: str, *, is_named: bool) -> list[Path]:
    """Files of a store by their suffix. A store that is there and cannot be listed is an error, not an empty one."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(suffix))
    except FileNotFoundError:
        if is_named:
            raise TrustError(
                f"trust store: {directory}: is not there. Make it, or correct FA4_KERNELS_TRUST_STORE."
            ) from None
        return []
    except OSError as error:
        raise TrustError(
            f"trust store: {directory}: cannot be read ({error.strerror}). Let this user read it; "
            "FA4_KERNELS_TRUST=off uses packs of anybody."
        ) from error


def _pinned_key(text: str) -> bytes:
    try:
        return public_key_from_pem(f"-----BEGIN PUBLIC KEY-----\n{text.strip()}\n-----END PUBLIC KEY-----\n")
    except ValueError as error:
        raise TrustError(
            f"FA4_KERNELS_TRUST_KEY: {error}. Give the line of base64 in a {PUBLIC_KEY_SUFFIX} file."
        ) from error


def environment_policy(environment: Mapping[str, str]) -> TrustPolicy:
    """The policy that these variables ask for."""
    return trust_policy(*(environment.get(name) for name in VARIABLES))
