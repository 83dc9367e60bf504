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
PUBLIC_KEY_SUFFIX = ".pub"

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
    """What the operator asks of packs. `keys`: key id -> public key, those that are trusted; `store`: for messages."""

    mode: str = "off"
    keys: Mapping[str, bytes]
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
        return (
            f"it is signed by {signers}, and trusted are the keys in {self.store}: {trusted}. Install a pack signed by "
            f"one of them, or have the operator add the signer's {PUBLIC_KEY_SUFFIX} file there"
        )


NO_TRUST = TrustPolicy(mode="off", keys={})
"""Packs are checked for damage, and not for who made them."""


def trust_policy(mode: str | None, store: str | None) -> TrustPolicy:
    """The policy of FA4_KERNELS_TRUST and FA4_KERNELS_TRUST_STORE.

    Args:
        mode: off, warn or require; None or empty: require if a store is named, else off.
        store: directory of public keys (`*.pub`, PEM); None or empty: DEFAULT_STORE.
    Raises: TrustError for an unknown mode, and for a store with a file that is no key: half a store trusts nobody.
    """
    mode = mode or ("require" if store else "off")
    if mode not in TRUST_MODES:
        raise TrustError(f"FA4_KERNELS_TRUST={mode}: unknown. Allowed: {', '.join(TRUST_MODES)}.")
    if mode == "off":
        return NO_TRUST
    directory = Path(store or DEFAULT_STORE)
    keys: dict[str, bytes] = {}
    for path in sorted(directory.glob(f"*{PUBLIC_KEY_SUFFIX}")):
        try:
            public_key = public_key_from_pem(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise TrustError(
                f"trust store: {path}: {error}. Remove the file, or replace it by a public key."
            ) from error
        keys[key_id(public_key)] = public_key
    return TrustPolicy(mode=mode, keys=keys, store=str(directory))
