"""Functions and names that generated node source may use."""

import numpy as np

from fa4build.simulate.hardware.gang import WARP, Fault
from fa4build.simulate.hardware.registers import DTYPES, to_kind

NODE_SCOPE: dict = {"count": np.count_nonzero, "where": np.where, "to_kind": to_kind, "np": np, **DTYPES}


def in_node_scope(function):
    """Makes a function callable from generated source under its own name."""
    NODE_SCOPE[function.__name__] = function
    return function


@in_node_scope
def merge(mask, new, old):
    """Lanes in the mask take `new`, the others keep `old` (None: never written, so anything)."""
    if old is None or new is None:
        return old if new is None else new
    if type(new) is tuple:
        return (np.where(mask, new[0], old[0]), np.where(mask, new[1], old[1]))
    return np.where(mask, new, old)


@in_node_scope
def special(g, name: str, kind: str):
    """A special register as an array; read-only and cached per gang."""
    key = (name, kind)
    value = g.special.get(key)
    if value is None:
        value = g.special[key] = _special(g, name).astype(DTYPES[kind])
        value.flags.writeable = False
    return value


def _special(g, name: str):
    cta = g.cta
    lane = g.tids % np.uint32(WARP)
    per_lane = {
        "laneid": lambda: lane,
        "warpid": lambda: g.tids // np.uint32(WARP),
        "lanemask_eq": lambda: np.uint32(1) << lane,
        "lanemask_lt": lambda: (np.uint32(1) << lane) - np.uint32(1),
        "lanemask_le": lambda: (np.uint32(2) << lane) - np.uint32(1),
        "lanemask_ge": lambda: ~((np.uint32(1) << lane) - np.uint32(1)),
        "lanemask_gt": lambda: ~((np.uint32(2) << lane) - np.uint32(1)),
    }
    if name in per_lane:
        return per_lane[name]().astype(np.uint64)
    if name.startswith("tid."):
        x, y, _ = cta.block
        index = {"x": g.tids % x, "y": g.tids // x % y, "z": g.tids // (x * y)}[name[-1]]
        return index.astype(np.uint64)
    if name in ("clock", "clock64", "globaltimer"):
        return np.full(g.lanes, cta.cluster.scheduler.steps, np.uint64)
    if name not in cta.special:
        raise Fault(f"special register %{name} is not modelled")
    return np.full(g.lanes, cta.special[name], np.uint64)


@in_node_scope
def symbol(g, name: str, kind: str):
    """Address of a shared, parameter or local symbol."""
    key = ("symbol", name, kind)
    if key not in g.special:
        g.special[key] = np.full(g.lanes, g.cta.symbol_address(name), np.uint64).astype(DTYPES[kind])
    return g.special[key]
