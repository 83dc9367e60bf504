"""Families by name. Modules are named by text and imported when asked for: the core depends on none of them.

A family that is not part of fa4build is announced by its distribution through the entry-point group `fa4build.families`
(name = the family's name, value = `module:ATTRIBUTE`), or given as `module:ATTRIBUTE` in place of a name.
"""

from __future__ import annotations

import difflib
import importlib
from functools import cache

from fa4build.errors import VariantError
from fa4build.families.interface import Family

DEFAULT = "fa4"
ENTRY_POINT_GROUP = "fa4build.families"

BUILT_IN = {
    "fa4": "fa4build.families.fa4:FAMILY",
    "flash-attn-4": "fa4build.families.flash_attn_4:FAMILY",
    "quack": "fa4build.families.quack:FAMILY",
}


def family_names() -> tuple[str, ...]:
    """Every name that `family_named` knows, aliases aside."""
    return tuple(sorted(_places()))


@cache
def family_named(name: str = DEFAULT) -> Family:
    """The family of this name.

    Raises: VariantError listing what is allowed, or saying why its module cannot be used.
    """
    places = _places()
    aliases = {"upstream": "flash-attn-4", "flash_attn_4": "flash-attn-4"}
    place = name if ":" in name else places.get(aliases.get(name, name))
    if place is None:
        near = difflib.get_close_matches(name, (*places, *aliases), n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        allowed = f"{', '.join(sorted(places))}, or module:ATTRIBUTE"
        raise VariantError(f"family {name!r} is unknown. Allowed: {allowed}.{meant}")
    module, _, attribute = place.partition(":")
    try:
        family = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise VariantError(f"family {name!r} is {place}, which cannot be imported: {error}.") from error
    if not isinstance(family, Family):
        raise VariantError(f"family {name!r}: {place} is a {type(family).__name__}, a Family is expected.")
    return family


def _places() -> dict[str, str]:
    """Name -> `module:ATTRIBUTE`; what installed distributions announce does not replace our own."""
    from importlib import metadata

    announced = {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return {**announced, **BUILT_IN}
