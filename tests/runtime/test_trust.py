"""Contract: a pack whose seal does not match is refused, signed or not; with FA4_KERNELS_TRUST=require, so is one that
no trusted key signed. Verification is plain Python, agrees with RFC 8032 and with another implementation, and refuses
everything malformed.
"""

import os
import random
import subprocess
import sys

import pytest
from fa4_kernels import packs, trust
from fa4_kernels.ed25519 import verify
from fa4_kernels.errors import PackError, TrustError
from fa4_kernels.packs import Pack, RefusedPack, open_pack
from fa4_kernels.trust import (
    SEAL_FILE,
    Seal,
    Signature,
    TrustPolicy,
    TrustWarning,
    environment_policy,
    key_id,
    public_key_from_pem,
    public_key_to_pem,
    read_seal,
    trust_policy,
)

from tests.runtime.conftest import RUNTIME
from tests.runtime.fake import write_pack, write_seal

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")

IDS = ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-fp16-hd64-full"]
# RFC 8032, section 7.1: seed, public key, message, signature of tests 1, 2, 3 and SHA(abc).
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe246"
        "55141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb"
        "00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc"
        "027beceea1ec40a",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2"
        "a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad"
        "9bef1177331a704",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493
SMALL_ORDER = [  # y = 1 (neutral), y = -1 (order 2), y = 0 (order 4), and a point of order 8
    (1).to_bytes(32, "little"),
    (2**255 - 20).to_bytes(32, "little"),
    bytes(32),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
]


def private_key(number=1):
    """A key made from a number, and its public bytes."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    return key, key.public_key().public_bytes_raw()


def flipped(data, bit):
    return bytes(byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(data))


@pytest.mark.parametrize("vector", VECTORS, ids=["empty", "one byte", "two bytes", "sha512"])
def test_the_vectors_of_the_standard_verify(vector):
    """And no other message does."""
    _, public_key, message, signature = map(bytes.fromhex, vector)

    assert verify(public_key, message, signature)
    assert not verify(public_key, message + b"\0", signature)


def test_every_single_bit_counts():
    """Key, message or signature with one bit turned over: false, whatever the bit."""
    _, public_key, message, signature = map(bytes.fromhex, VECTORS[2])

    assert not any(verify(public_key, message, flipped(signature, bit)) for bit in range(0, 512, 3))
    assert not any(verify(flipped(public_key, bit), message, signature) for bit in range(0, 256, 3))
    assert not any(verify(public_key, flipped(message, bit), signature) for bit in range(16))


def test_agrees_with_another_implementation():
    """Messages of many lengths, keys of many values, signed by OpenSSL."""
    for number in range(1, 25):
        key, public_key = private_key(number)
        message = bytes(range(number)) * number
        signature = key.sign(message)

        assert verify(public_key, message, signature)
        assert not verify(private_key(number + 1)[1], message, signature)


def test_what_is_malformed_is_false():
    """Wrong lengths, a scalar that is not reduced (the same signature twice otherwise), a y beyond the prime."""
    key, public_key = private_key()
    signature = key.sign(b"m")
    scalar = int.from_bytes(signature[32:], "little")

    assert verify(public_key, b"m", signature)
    assert not verify(public_key, b"m", signature[:32] + (scalar + ORDER).to_bytes(32, "little"))
    assert not verify(public_key, b"m", signature[:-1])
    assert not verify(public_key[:-1], b"m", signature)
    assert not verify((2**255 - 19).to_bytes(32, "little"), b"m", signature)


@pytest.mark.parametrize("public_key", SMALL_ORDER, ids=["1", "2", "4", "8"])
def test_keys_of_small_order_sign_nothing(public_key):
    """With R = neutral and S = 0 they would verify some message without a private key."""
    forged = (1).to_bytes(32, "little") + bytes(32)

    assert not any(verify(public_key, bytes([i]), forged) for i in range(40))


def test_a_seal_reads_back_and_any_change_is_found():
    """Every bit of its text."""
    digests = {"__init__.py": "0" * 64, "manifest.json": "1" * 64}
    seal = Seal(files=digests, signatures=(Signature(key_id="ab" * 8, value=bytes(range(64))),))

    assert read_seal(seal.text()) == seal
    for bit in range(8 * len(seal.text())):
        with pytest.raises(PackError, match=r"its seal\.txt is damaged"):
            read_seal(flipped(seal.text(), bit))


def test_a_pack_needs_its_seal(tmp_path):
    """Missing, or of another manifest."""
    directory = write_pack(tmp_path / "pack", IDS)
    assert isinstance(open_pack("test", directory), Pack)
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"head_dim":128', '"head_dim":129'))

    assert "its manifest is damaged: its sha256 is not that of the seal" in open_pack("test", directory).reason
    (directory / SEAL_FILE).unlink()
    assert "cannot be read" in open_pack("test", directory).reason


def signed_pack(directory, key):
    """A pack with a signature."""
    write_pack(directory, IDS)
    public_key = key.public_key().public_bytes_raw()
    unsigned = write_seal(directory)
    write_seal(directory, [Signature(key_id=key_id(public_key), value=key.sign(unsigned.signed))])
    return directory


def policy(mode, *numbers):
    keys = [private_key(number)[1] for number in numbers]
    return TrustPolicy(mode=mode, keys={key_id(public_key): public_key for public_key in keys}, store="store")


@pytest.mark.parametrize(
    ("mode", "trusted", "signer", "reason"),
    [
        pytest.param("require", (1,), 1, None, id="trusted"),
        pytest.param("require", (2, 1), 1, None, id="one of several"),
        pytest.param("require", (2,), 1, "it is signed by {1}, and trusted are the keys in store: {2}", id="another"),
        pytest.param("require", (), 1, "trusted are the keys in store: none", id="empty store"),
        pytest.param("require", (1,), None, "it is signed by nobody", id="unsigned"),
        pytest.param("off", (), None, None, id="off"),
        pytest.param("warn", (1,), 1, None, id="warn, trusted"),
    ],
)
def test_trust_is_a_table(tmp_path, mode, trusted, signer, reason):
    """Mode, trusted keys, signer -> used or refused, and why."""
    directory = tmp_path / "pack"
    if signer is None:
        write_pack(directory, IDS)
    else:
        signed_pack(directory, private_key(signer)[0])
    pack = open_pack("test", directory, policy(mode, *trusted))

    if reason is None:
        assert isinstance(pack, Pack)
    else:
        names = {str(number): key_id(private_key(number)[1]) for number in (1, 2)}
        for number, name in names.items():
            reason = reason.replace(f"{{{number}}}", name)
        assert isinstance(pack, RefusedPack)
        assert reason in pack.reason


def test_warn_uses_the_pack_and_says_so(tmp_path):
    """Every process that finds it."""
    directory = write_pack(tmp_path / "pack", IDS)

    with pytest.warns(TrustWarning, match="a pack is used although it is signed by nobody"):
        assert isinstance(open_pack("test", directory, policy("warn", 1)), Pack)


def test_a_resealed_manifest_keeps_no_signature(tmp_path):
    """An attacker can write a matching seal, and cannot sign it."""
    directory = signed_pack(tmp_path / "pack", private_key(1)[0])
    signature = read_seal((directory / SEAL_FILE).read_bytes()).signatures
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version":"0.1.0"', '"version":"0.2.0"'))
    write_seal(directory, signature)
    pack = open_pack("test", directory, policy("require", 1))

    assert "is wrong: it was changed after signing" in pack.reason
    assert isinstance(open_pack("test", directory), Pack)  # the seal alone does not notice: that is what trust is for


def test_the_store_is_a_directory_of_public_keys(tmp_path):
    """Read as `openssl pkey -pubout` writes them; a file that is none makes the whole store unusable."""
    _, public_key = private_key(3)
    (tmp_path / "release.pub").write_text(public_key_to_pem(public_key))
    (tmp_path / "README").write_text("not a key")

    assert public_key_from_pem(public_key_to_pem(public_key)) == public_key
    assert trust_policy("require", str(tmp_path)).keys == {key_id(public_key): public_key}
    assert trust_policy(None, str(tmp_path)).mode == "require"
    (tmp_path / "other.pub").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(TrustError, match=r"other\.pub: no Ed25519 public key"):
        trust_policy("require", str(tmp_path))
    with pytest.raises(TrustError, match=r"FA4_KERNELS_TRUST=maybe: unknown\. Allowed: off, warn, require"):
        trust_policy("maybe", None)


def test_a_known_key_turns_verification_on(tmp_path, monkeypatch):
    """In the default store, a named store or the environment; `off` must be asked for. No key anywhere: off."""
    default = tmp_path / "default"
    monkeypatch.setattr(trust, "DEFAULT_STORE", str(default))
    _, public_key = private_key(3)
    line = public_key_to_pem(public_key).splitlines()[1]

    assert trust_policy().mode == "off"
    default.mkdir()
    assert trust_policy().mode == "off"
    assert environment_policy({"FA4_KERNELS_TRUST_KEY": line}).keys == {key_id(public_key): public_key}
    assert environment_policy({"FA4_KERNELS_TRUST_KEY": line}).mode == "require"
    (default / "release.pub").write_text(public_key_to_pem(public_key))
    assert (trust_policy().mode, trust_policy().keys) == ("require", {key_id(public_key): public_key})
    assert trust_policy("warn").mode == "warn"
    assert trust_policy("off", str(default), line).mode == "off"
    with pytest.raises(TrustError, match="FA4_KERNELS_TRUST_KEY: no Ed25519 public key"):
        trust_policy(key=line[:-4])


def test_a_store_that_cannot_be_read_is_no_empty_store(tmp_path, monkeypatch):
    """Nothing is trusted then: a wrong path, a file in its place, a directory of somebody else."""
    with pytest.raises(TrustError, match="is not there"):
        trust_policy(None, str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(trust, "DEFAULT_STORE", str(tmp_path / "file"))
    with pytest.raises(TrustError, match=r"cannot be read \(Not a directory\)"):
        trust_policy()


def test_a_revoked_key_is_trusted_no_longer(tmp_path):
    """Also while its .pub file is there; the message says so. A line that is no key id makes the store unusable."""
    key, public_key = private_key(1)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "old.pub").write_text(public_key_to_pem(public_key))
    directory = signed_pack(tmp_path / "pack", key)
    before = open_pack("test", directory, trust_policy(None, str(tmp_path / "store")))
    (tmp_path / "store" / "2026.revoked").write_text(f"# stolen\n{key_id(public_key)}  # on a Friday\n")
    after = open_pack("test", directory, trust_policy(None, str(tmp_path / "store")))

    assert isinstance(before, Pack)
    assert f"key {key_id(public_key)} is revoked in" in after.reason
    (tmp_path / "store" / "other.revoked").write_text("release.pub\n")
    with pytest.raises(TrustError, match=r"'release\.pub' is no key id"):
        trust_policy(None, str(tmp_path / "store"))


def test_pem_is_what_others_write():
    """By the other implementation, for the same key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, public_key = private_key(9)
    theirs = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    assert public_key_to_pem(public_key) == theirs
    with pytest.raises(ValueError, match="no Ed25519 public key"):
        public_key_from_pem(theirs.replace("MCow", "?Cow"))


def install(site, directory):
    """Make a pack look installed: its package, and a distribution that announces it."""
    info = site / "fa4_kernels_test-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fa4-kernels-test\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[fa4_kernels.packs]\nfa4-kernels-test = {directory.name}\n")


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        pytest.param({}, 0, "fwd-sm90a-bf16-hd128-causal", id="off"),
        pytest.param({"FA4_KERNELS_TRUST": "require"}, 1, "signed by nobody", id="require"),
        pytest.param({"FA4_KERNELS_TRUST": "warn"}, 0, "TrustWarning", id="warn"),
        pytest.param({"FA4_KERNELS_TRUST": "maybe"}, 1, "Allowed: off, warn, require", id="typo"),
    ],
)
def test_the_environment_decides_in_a_fresh_process(tmp_path, environment, status, said):
    """And the code in a pack's __init__ never runs: nothing of it is imported."""
    directory = write_pack(tmp_path / "site" / "fa4_kernels_test", IDS)
    (directory / "__init__.py").write_text("raise SystemExit('imported')\n")
    write_seal(directory)
    install(tmp_path / "site", directory)
    variables = {"PYTHONPATH": f"{RUNTIME}:{tmp_path / 'site'}", "PATH": os.environ["PATH"], **environment}
    command = [sys.executable, "-m", "fa4_kernels", "list"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)

    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr


def test_a_zipped_pack_is_found(tmp_path, monkeypatch):
    """Its files are read through the zip importer."""
    import shutil

    directory = write_pack(tmp_path / "site" / "fa4_kernels_zipped", IDS)
    archive = shutil.make_archive(str(tmp_path / "packs"), "zip", directory.parent)
    monkeypatch.syspath_prepend(archive)
    pack = open_pack("test", packs._directory_of("fa4_kernels_zipped"))

    assert isinstance(pack, Pack)
    assert len(packs.PackReader().read(pack, pack.manifest.entries[0])) == 2


def kernels_that_load(directory):
    """How many kernels of a pack could reach the driver."""
    pack = open_pack("test", directory)
    if isinstance(pack, RefusedPack):
        return 0
    reader, count = packs.PackReader(), 0
    for entry in pack.manifest.entries:
        try:
            reader.read(pack, entry)
            count += 1
        except PackError:
            pass
    return count


@pytest.mark.parametrize("drawn", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_flipped_byte_anywhere_in_a_pack_never_loads(tmp_path, drawn):
    """Places drawn over all its files by size with the seed 3, and the first 80 bytes of each file: the header of the
    xz stream, of the seal and of the manifest. Nothing is signed here: the seal alone must notice."""
    directory = write_pack(tmp_path / "pack", IDS)
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    draw = random.Random(3)
    names = draw.choices(list(files), weights=[len(data) for data in files.values()], k=drawn)
    places = [(name, draw.randrange(len(files[name]))) for name in names]
    places += [(name, place) for name, data in files.items() for place in range(min(80, len(data)))]
    assert kernels_that_load(directory) == 2

    for name, place in places:
        changed = bytearray(files[name])
        changed[place] ^= 1 << place % 8
        (directory / name).write_bytes(changed)
        assert kernels_that_load(directory) == 0, (name, place)
        (directory / name).write_bytes(files[name])


def fields_of(document, path=()):
    """Every field of a manifest, however deep, as a path of keys."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from fields_of(value, (*path, key))


def test_every_field_of_the_manifest_is_sealed(tmp_path):
    """Each replaced by another value: nothing loads, whatever the field means."""
    import json

    directory = write_pack(tmp_path / "pack", IDS)
    path = directory / "manifest.json"
    text = path.read_text()
    fields = list(fields_of(json.loads(text)))
    assert ("entries", 1, "cubin", "sha256") in fields
    assert len(fields) > 60

    for field in fields:
        document = inner = json.loads(text)
        for key in field[:-1]:
            inner = inner[key]
        inner[field[-1]] = 7 if inner[field[-1]] != 7 else 8
        path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")
        assert kernels_that_load(directory) == 0, field
