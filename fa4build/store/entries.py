"""Entries of the cache as values and as files: a document that names its own digest, and objects by theirs.

A file is trusted byte for byte: what is not as `sealed` writes it is damaged.
"""

import dataclasses
import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fa4build.errors import CacheCorruptError
from fa4build.store.keys import InputsAsText, as_json, key_of

OBJECTS = ("cubin", "plan", "ptx", "log")
KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Digest and size (bytes) of one object."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One finished compile.

    Attributes:
        key: sha256 of the canonical JSON of `inputs`.
        name: the variant's id.
        inputs: everything that went into the key.
        facts: what was read back from the result: symbols, registers, ...
        objects: by name (OBJECTS).
        last_use: seconds since the epoch, to within a day; not part of the entry's value.
    """

    key: str
    name: str
    inputs: Mapping[str, Any]
    facts: Mapping[str, Any]
    objects: Mapping[str, StoredObject]
    last_use: float = dataclasses.field(compare=False)

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(stored.size for stored in self.objects.values())


Accept = Callable[[CacheEntry, Mapping[str, bytes]], None]
"""Looks at an entry and its objects, by name, before they are taken over."""


def object_name(digest: str) -> str:
    """Where an object lies below the root of a cache."""
    return f"objects/{digest[:2]}/{digest}"


def sealed(body: Mapping[str, Any]) -> bytes:
    """An action file: the body and its own digest."""
    return as_json({"body": body, "sha256": hashlib.sha256(as_json(body)).hexdigest()}) + b"\n"


_HEAD, _SEAL, _TAIL = b'{"body":', b',"sha256":"', b'"}\n'  # of what `sealed` writes
_SEAL_BYTES = len(_SEAL) + 64 + len(_TAIL)
_INPUTS = b',"inputs":'
_OBJECTS_OF = b',"objects":'  # the last field of a body


def _sealed_body(data: bytes) -> bytes | None:
    """The body's own bytes, once their digest is right; None for a file that is written in any other way."""
    body, seal = data[len(_HEAD) : -_SEAL_BYTES], data[-_SEAL_BYTES:]
    whole = _SEAL + hashlib.sha256(body).hexdigest().encode() + _TAIL
    return body if data.startswith(_HEAD) and seal == whole else None


def _parsed_body(data: bytes, key: str) -> tuple[dict[str, Any], bool]:
    """The body of a file whose digest is right, and whether its inputs are known to be those of the key.

    They are left unparsed where they stand as `sealed` writes them. Raises: CacheCorruptError, or as json does.
    """
    raw = _sealed_body(data)
    if raw is None:
        document = json.loads(data)
        if hashlib.sha256(as_json(document["body"])).hexdigest() != document["sha256"]:
            raise CacheCorruptError("it does not match its digest")
        return document["body"], False
    start = raw.find(_INPUTS) + len(_INPUTS)
    end = raw.rfind(f',"key":"{key}","name":'.encode())
    if hashlib.sha256(raw[start:end]).hexdigest() != key:
        return json.loads(raw), False
    return json.loads(raw[:start] + b"{}" + raw[end:]) | {"inputs": InputsAsText(raw[start:end])}, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a prune wants to know of an entry: sizes of its objects by digest."""

    key: str
    last_use: float
    sizes: Mapping[str, int]


def sizes_of(data: bytes, key: str) -> dict[str, int]:
    """Sizes of an entry's objects by digest. Of a whole file only these are parsed. Raises: CacheCorruptError."""
    body = _sealed_body(data)
    if body is None:
        objects: Any = {
            name: dataclasses.asdict(x) for name, x in unsealed(data, key, last_use=0.0, origin=key).objects.items()
        }
    else:
        objects = json.loads(body[body.rindex(_OBJECTS_OF) + len(_OBJECTS_OF) : -1]) if _OBJECTS_OF in body else {}
    try:
        sizes = {str(stored["sha256"]): stored["size"] for stored in objects.values()}
        if not all(type(size) is int for size in sizes.values()):
            raise ValueError("a size in it is none")
        return sizes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheCorruptError(f"entry {key} is damaged: no entry ({error}).") from error


def unsealed(data: bytes, key: str, *, last_use: float, origin: str) -> CacheEntry:
    """The entry in an action file. Raises: CacheCorruptError unless every byte of it is as it was written."""
    try:
        body, is_known = _parsed_body(data, key)
        if body["key"] != key or not (is_known or key_of(body["inputs"]) == key):
            raise CacheCorruptError("it holds the entry of another key")
        objects = {name: StoredObject(**stored) for name, stored in body["objects"].items()}
        if fault := _form_fault(body, objects):
            raise CacheCorruptError(fault)
        entry = CacheEntry(
            key=key, name=body["name"], inputs=body["inputs"], facts=body["facts"], objects=objects, last_use=last_use
        )
    except CacheCorruptError as error:
        raise CacheCorruptError(f"{origin} is damaged: {error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheCorruptError(f"{origin} is damaged: no entry ({type(error).__name__}: {error}).") from error
    return entry


def _form_fault(body: Mapping[str, Any], objects: Mapping[str, StoredObject]) -> str | None:
    """What of an entry has no form that `put` writes; a digest alone does not keep a stranger's file from the rest."""
    if set(objects) != set(OBJECTS):
        return f"its objects are {', '.join(sorted(objects))}"
    if type(body["name"]) is not str or type(body["facts"]) is not dict:
        return "its name or its facts are none"
    for stored in objects.values():
        if type(stored.sha256) is not str or not KEY.fullmatch(stored.sha256) or type(stored.size) is not int:
            return "a digest or a size in it is none"
    return None


@contextmanager
def no_collection() -> Iterator[None]:
    """While many values are made that all live on, looking for garbage among them costs more than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
