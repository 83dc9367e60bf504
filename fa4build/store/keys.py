"""Keys of the cache: everything that decides the result of a compile, as one JSON text, and its sha256."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

KEY_SCHEMA = 1
"""Version of what goes into a key. A change of meaning needs a new number, which makes every older entry a miss."""


def canonical(value: object) -> Any:
    """A value as JSON in which different values differ and equal ones are equal, on every machine.

    Dataclasses keep their type and every field; floats are exact. Refused is what has no such form: paths (a checkout
    must not matter), sets, bytes, NaN, objects.

    Raises: TypeError naming the type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return {"$float": value.hex()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: canonical(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [canonical(item) for item in value]
    if isinstance(value, Mapping) and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: canonical(item) for name, item in value.items()}
    hint = " A key must not depend on where files lie." if isinstance(value, PurePath) else ""
    raise TypeError(f"{type(value).__name__} {value!r} cannot be part of a cache key.{hint}")


def key_inputs(source: object, tuning: object, toolchain: object, options: object) -> dict[str, Any]:
    """Everything that goes into a key, as JSON.

    Args:
        source: the rendered kernel (`KernelSource`): variant, text, symbol, digests of all kernel code it reaches.
        tuning: `Tuning`; toolchain: `Toolchain`, with the compile process's environment; options: `CompileOptions`.
    """
    return {
        "schema": KEY_SCHEMA,
        "source": canonical(source),
        "tuning": canonical(tuning),
        "toolchain": canonical(toolchain),
        "options": canonical(options),
    }


def key_of(inputs: Mapping[str, Any]) -> str:
    """The key of `key_inputs`: 64 hexadecimal digits."""
    return hashlib.sha256(as_json(inputs)).hexdigest()


def cache_key(source: object, tuning: object, toolchain: object, options: object) -> str:
    """The key under which the compile of a rendered kernel is stored."""
    return key_of(key_inputs(source, tuning, toolchain, options))


def as_json(document: object) -> bytes:
    """The one text of a document: sorted, without blanks. Raises: TypeError for what JSON does not have."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_parsed)
    return text.encode()


def _parsed(value: object) -> dict[str, Any]:
    if isinstance(value, InputsAsText):
        return value.parsed()
    raise TypeError(f"{type(value).__name__} cannot be part of an entry.")


class InputsAsText(Mapping[str, Any]):
    """Inputs as they stand in a file, parsed each time that somebody wants one: of many entries hardly anybody does."""

    __slots__ = ("_text",)

    def __init__(self, text: bytes) -> None:
        self._text = text

    def parsed(self) -> dict[str, Any]:
        """All of them, by one parse."""
        return json.loads(self._text)

    def __getitem__(self, name: str) -> Any:
        return self.parsed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parsed())

    def __len__(self) -> int:
        return len(self.parsed())

    def __repr__(self) -> str:
        return repr(self.parsed())
