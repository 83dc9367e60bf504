"""Reads a matrix specification: a TOML file that names a part of the variant matrix.

    edition = 1
    select = ["fwd-sm90a-*-hd256-*"]     # globs over ids
    exclude = ["*-fp16-*"]               # taken away at the end

    [[matrix]]                           # the product of the listed values
    op = ["fwd"]
    arch = ["sm90"]
    head_dim = [64, 128, "192x128"]

In a block, arch, dtype, head_dim or mask left out stands for every value; any other axis left out, for its default.
This module knows the file's form, whose schema is made from the axes; what a block selects is decided in `variants.py`.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fa4build.errors import VariantError
from fa4build.matrix.arch import ARCHES, arch_named
from fa4build.matrix.axes import AXES, spell_head_dims

if TYPE_CHECKING:
    import jsonschema

EDITION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Values wanted of each listed axis, named as in `axes.AXES`. `place` is for messages: `matrix[0]`."""

    place: str
    axes: MappingProxyType[str, tuple]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A specification that has been read and checked against its schema."""

    path: str
    select: tuple[str, ...]
    exclude: tuple[str, ...]
    blocks: tuple[Block, ...]


def schema() -> dict[str, Any]:
    """The JSON schema of a specification, made from the axes: a new axis or value needs no edit here."""
    block = {"type": "object", "required": ["op"], "additionalProperties": False, "properties": _axis_schemas()}
    properties = {
        "edition": {"type": "integer", "const": EDITION},
        "select": _GLOBS,
        "exclude": _GLOBS,
        "matrix": {"type": "array", "minItems": 1, "items": block},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fa4build matrix specification, edition {EDITION}",
        "type": "object",
        "required": ["edition"],
        "additionalProperties": False,
        "properties": properties,
    }


_LIST = {"type": "array", "minItems": 1, "uniqueItems": True}
_GLOBS = _LIST | {"items": {"type": "string", "minLength": 1}}


def _axis_schemas() -> dict[str, Any]:
    """A list of each axis's values, as files spell them."""
    found: dict[str, Any] = {}
    for axis, values in AXES.items():
        name, items = _spelled(axis, values)
        found[name] = _LIST | {"items": items}
    return found


def _spelled(axis: str, values: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    """How a file names an axis, and what may stand there."""
    if axis == "head_dims":
        spelled = [spell_head_dims(dims).removeprefix("hd") for dims in values]
        return "head_dim", {"enum": [int(text) if text.isdecimal() else text for text in spelled]}
    if axis == "arch":
        return axis, {"enum": [name for arch in ARCHES for name in (arch.name, *arch.aliases)]}
    if values == (False, True):
        return axis, {"type": "boolean"}
    return axis, {"enum": list(values)}


def read_spec(path: Path | str) -> Spec:
    """The specification in this file.

    Raises: VariantError if the file cannot be read, is no TOML, or does not follow the schema; it names the key.
    """
    return parse_spec(_read_text(Path(path)), path=str(path))


def parse_spec(text: str, *, path: str) -> Spec:
    """The specification in this text; `path` is for messages. Raises: VariantError, as `read_spec`."""
    document = _parse_toml(text, path)
    _check(document, path)
    blocks = tuple(_block(f"matrix[{i}]", block) for i, block in enumerate(document.get("matrix", ())))
    select = tuple(document.get("select", ()))
    if not select and not blocks:
        raise VariantError(f"{path}: selects nothing. Add `select` or a [[matrix]] block.")
    return Spec(path=path, select=select, exclude=tuple(document.get("exclude", ())), blocks=blocks)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VariantError(f"{path}: cannot be read as a specification: {error}. Give a TOML file in UTF-8.") from error


def _parse_toml(text: str, path: str) -> dict:
    # Imported here: only runs with a specification pay for it.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise VariantError(
            f"{path}: is not valid TOML: {error}. docs/guide/build-a-matrix.md shows an example."
        ) from error


def _check(document: dict, path: str) -> None:
    import jsonschema  # imported here, as TOML is

    edition = document.get("edition")
    if type(edition) is int and edition > EDITION:
        raise VariantError(f"{path}: edition {edition} is newer than this fa4build reads ({EDITION}). Update fa4build.")
    errors = sorted(jsonschema.Draft202012Validator(schema()).iter_errors(document), key=lambda error: error.json_path)
    if errors:
        lines = "; ".join(_describe(error) for error in errors)
        raise VariantError(f"{path}: {lines}.")


def _describe(error: jsonschema.ValidationError) -> str:
    place = error.json_path.removeprefix("$").removeprefix(".")
    return f"{place}: {_in_words(error)}" if place else _in_words(error)


def _in_words(error: jsonschema.ValidationError) -> str:
    """What is wrong, and what is allowed."""
    if error.validator == "required":
        return f"the key {error.message.split(' ', 1)[0]} is missing"
    if error.validator == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = sorted(set(error.instance) - set(known))
        near = [close for name in unknown for close in difflib.get_close_matches(name, known, n=1)]
        meant = f". Did you mean {' and '.join(near)}?" if near else ""
        return f"unknown: {', '.join(unknown)}; allowed: {', '.join(known)}{meant}"
    if error.validator == "type" and error.json_path == "$.matrix":
        return "is one table; write [[matrix]] instead of [matrix]"
    if error.validator == "type" and isinstance(error.instance, str | int) and error.schema.get("type") == "array":
        return f"{error.instance!r} must be a list: [{error.instance!r}]"
    return error.message


def _head_dims(value: int | str) -> tuple[int, int]:
    head_dim, _, head_dim_v = str(value).partition("x")
    return int(head_dim), int(head_dim_v or head_dim)


def _block(place: str, raw: dict) -> Block:
    axes = {name: tuple(values) for name, values in raw.items() if name not in ("arch", "head_dim")}
    if "arch" in raw:
        axes["arch"] = tuple(arch_named(name).name for name in raw["arch"])
    if "head_dim" in raw:
        axes["head_dims"] = tuple(map(_head_dims, raw["head_dim"]))
    return Block(place=place, axes=MappingProxyType(axes))
