"""Ed25519 keys and signatures on the builder's side. Whoever installs a pack checks them with the runtime's own code.

Private keys are PEM files (PKCS #8, not encrypted, readable by their owner alone), public ones PEM files that operators
put into their trust store; `openssl pkey` reads both. Signing is the `cryptography` package's work.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fa4build.errors import KeyFileError
from fa4build.files import write_atomically
from fa4build.runtime.fa4_kernels.ed25519 import verify
from fa4build.runtime.fa4_kernels.trust import (
    PUBLIC_KEY_SUFFIX,
    Signature,
    key_id,
    public_key_from_pem,
    public_key_to_pem,
)
from fa4build.shipping.pack import Pack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PRIVATE_KEY_SUFFIX = ".key"


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A private key that is loaded. It never shows in a representation."""

    public_key: bytes
    _private: "Ed25519PrivateKey" = field(repr=False)

    @property
    def key_id(self) -> str:
        """How seals name the key."""
        return key_id(self.public_key)

    @property
    def public_pem(self) -> str:
        """What an operator puts into a trust store."""
        return public_key_to_pem(self.public_key)

    def sign(self, message: bytes) -> Signature:
        """The signature over a message; equal messages give equal signatures."""
        value = self._private.sign(message)
        if not verify(self.public_key, message, value):  # the check that users' machines make, by other code
            raise KeyFileError(f"key {self.key_id} makes signatures that do not verify. Make a new one.")
        return Signature(key_id=self.key_id, value=value)


def new_key(directory: Path, name: str) -> tuple[Path, Path, SigningKey]:
    """Make a key and write `<name>.key` and `<name>.pub`.

    Raises: KeyFileError if one of the files is there already: a key is never overwritten.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not name or "/" in name or name.startswith("."):
        raise KeyFileError(f"key name {name!r}: a plain file name is needed, e.g. release.")
    private_path, public_path = (directory / f"{name}{suffix}" for suffix in (PRIVATE_KEY_SUFFIX, PUBLIC_KEY_SUFFIX))
    for path in (private_path, public_path):
        if path.exists():
            raise KeyFileError(f"{path}: is there already, and keys are never overwritten. Choose another --name.")
    key = Ed25519PrivateKey.generate()
    signing_key = _signing_key(key)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(private_path, _private_pem(key), mode=0o600)
    write_atomically(public_path, signing_key.public_pem.encode())
    return private_path, public_path, signing_key


def load_key(path: Path) -> SigningKey:
    """The private key in a file. Raises: KeyFileError if it cannot be read, or is no unencrypted Ed25519 key in PEM."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path}: no private key ({error}). Make one: fa4build key new.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: {type(key).__name__}, Ed25519 is needed. Make one: fa4build key new.")
    return _signing_key(key)


def read_public_key(path: Path) -> tuple[str, str]:
    """Key id and public PEM of a key file, private or public. Raises: KeyFileError if it is neither."""
    try:
        public_key = public_key_from_pem(path.read_text(encoding="ascii"))
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read ({error.strerror}). Give a .key or .pub file.") from error
    except ValueError:
        public_key = load_key(path).public_key
    return key_id(public_key), public_key_to_pem(public_key)


def sign_pack(pack: Pack, key: SigningKey) -> Pack:
    """The pack, signed by one more key (or anew by the same)."""
    others = tuple(signature for signature in pack.signatures if signature.key_id != key.key_id)
    return replace(pack, signatures=(*others, key.sign(pack.seal.signed)))


def _signing_key(key: "Ed25519PrivateKey") -> SigningKey:
    return SigningKey(public_key=key.public_key().public_bytes_raw(), _private=key)


def _private_pem(key: "Ed25519PrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
