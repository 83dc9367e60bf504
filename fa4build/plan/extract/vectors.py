"""Proof by example: random inputs on which the plan must equal an interpretation of the code that it came from.

Some of them are stored in the plan, so that every evaluator can replay them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fa4build.errors import LaunchPlanError
from fa4build.plan.evaluation import canonical_digest, evaluate, evaluate_nodes, round_float, unsigned
from fa4build.plan.extract.concrete import ConcreteLaunch, HostRefusedError, run_entry
from fa4build.plan.extract.entry import Parameter
from fa4build.plan.extract.launch import MapWords
from fa4build.plan.extract.mlir_text import Module
from fa4build.plan.extract.tensor_map import IGNORED_BITS, WORDS, pack_map
from fa4build.plan.values import (
    BytesParam,
    Launch,
    LaunchPlan,
    Node,
    TensorMapParam,
    Vector,
    leaves,
)

STORED_VECTORS = 4
COMPARED_INPUTS = 8
MAP_INPUTS = 8
_REPAIRS = 64  # rounds of adjusting inputs to the guards
_CLUSTER, _PDL, _COOPERATIVE = 4, 6, 2


def random_inputs(plan: LaunchPlan, rng: random.Random) -> dict[str, int | float]:
    """Plausible values for all leaves that every guard allows.

    Raises: LaunchPlanError when adjusting them to the guards does not succeed.
    """
    inputs = {name: _draw(name, type_, rng) for name, type_ in leaves(plan).items()}
    for _ in range(_REPAIRS):
        values = evaluate_nodes(plan, inputs)
        broken = [guard for guard in plan.guards if not values[guard.expr]]
        if not broken:
            return inputs
        for guard in broken:
            _repair(plan.nodes, guard.expr, inputs, values)
    raise LaunchPlanError(f"no inputs found that satisfy the guard {broken[0].message!r}")


def _draw(name: str, type_: str, rng: random.Random) -> int | float:
    if type_ in ("f32", "f64"):
        return round_float(rng.uniform(-4.0, 4.0), type_)
    if name.endswith(".ptr"):
        return rng.randrange(1 << 20, 1 << 39) * 256
    if ".stride[" in name:
        return rng.randrange(1, 1 << rng.randrange(1, 24)) * 64
    if type_ == "i1":
        return rng.randrange(2)
    if type_ in ("i8", "i16"):
        return rng.randrange(1, 100)
    return rng.randrange(1, 1 << rng.randrange(4, 14))


def _repair(nodes: Sequence[Node], expr: int, inputs: dict[str, int | float], values: Sequence[int | float]) -> None:
    """Change the inputs so that one broken condition becomes true, for the forms that guards have."""
    op = nodes[expr]
    if op[0] == "and":
        for side in op[2:]:
            if not values[side]:
                _repair(nodes, side, inputs, values)
    elif op[0] == "or":
        _repair(nodes, op[3], inputs, values)
    elif op[0] == "eq":
        left, right = nodes[op[2]], nodes[op[3]]
        if left[0] in ("and", "urem", "srem") and right[0] == "const":
            _round_down(nodes, left, inputs, values)
        else:
            _set(nodes, op[3], values[op[2]], inputs, values) or _set(nodes, op[2], values[op[3]], inputs, values)
    elif op[0] in ("sge", "sgt", "uge", "ugt"):
        _set(nodes, op[2], values[op[3]] + 1, inputs, values) or _set(nodes, op[3], values[op[2]] - 1, inputs, values)
    elif op[0] in ("sle", "slt", "ule", "ult"):
        _set(nodes, op[2], values[op[3]] - 1, inputs, values) or _set(nodes, op[3], values[op[2]] + 1, inputs, values)


def _round_down(nodes: Sequence[Node], remainder: Node, inputs: dict[str, int | float], values: Sequence) -> None:
    """Make `x & (2**k - 1)` or `x % n` zero by lowering x to a multiple of it, at least one."""
    divisor = int(values[remainder[3]]) + (remainder[0] == "and")
    value = int(values[remainder[2]])
    if divisor:
        _set(nodes, remainder[2], max(value - value % divisor, divisor), inputs, values)


def _set(
    nodes: Sequence[Node], node: int, value: int | float, inputs: dict[str, int | float], values: Sequence
) -> bool:
    """Give the leaf under a node, its other operands as they are, the value that makes the node `value`."""
    op = nodes[node]
    if op[0] == "in":
        inputs[op[2]] = value
        return True
    if op[0] in ("sext", "zext", "trunc"):
        return _set(nodes, op[2], value, inputs, values)
    other = int(values[op[3]]) if len(op) == 4 else 0
    if op[0] == "mul" and other:
        if int(value) % other:
            return False
        return _set(nodes, op[2], int(value) // other, inputs, values)
    if op[0] == "add":
        return _set(nodes, op[2], int(value) - other, inputs, values)
    if op[0] in ("sdiv", "udiv") and other:
        return _set(nodes, op[2], int(value) * other, inputs, values)
    return False


def check_maps(plan: LaunchPlan, maps: Sequence[MapWords]) -> None:
    """Every recovered map, packed again, gives the words that host code packs, on random inputs.

    Raises: LaunchPlanError for a word that differs.
    """
    rng = random.Random(0)
    for _ in range(MAP_INPUTS if maps else 0):
        inputs = {name: _draw(name, type_, rng) for name, type_ in leaves(plan).items()}
        values = evaluate_nodes(plan, inputs)
        for found in maps:
            t = found.template
            param = TensorMapParam(
                dtype=t.dtype,
                addr=int(values[t.addr]),
                dims=tuple(int(values[i]) for i in t.dims),
                strides=tuple(int(values[i]) for i in t.strides),
                box=t.box,
                elem_strides=t.elem_strides,
                swizzle=t.swizzle,
                interleave=t.interleave,
                l2_promotion=t.l2_promotion,
                oob_fill=t.oob_fill,
            )
            _same_words(pack_map(param), [unsigned(int(values[i]), "i64") for i in found.words], f"inputs {inputs}")


def _same_words(packed: Sequence[int], words: Sequence[int], place: str) -> None:
    for i, (ours, theirs, ignored) in enumerate(zip(packed, words, IGNORED_BITS, strict=True)):
        if (ours ^ theirs) & ~ignored:
            raise LaunchPlanError(
                f"a tensor map packed again differs in word {i}: {ours:#018x} instead of {theirs:#018x} ({place})"
            )


def make_vectors(
    plan: LaunchPlan, module: Module, parameters: Sequence[Parameter], compared: int = COMPARED_INPUTS
) -> tuple[Vector, ...]:
    """Examples to store, after the plan has equalled the interpreter on them and on some more, `compared` in all.

    Raises: LaunchPlanError when the plan and the code it came from disagree on some inputs.
    """
    rng = random.Random(0)
    vectors = []
    for _ in range(compared):
        inputs = random_inputs(plan, rng)
        launches = evaluate(plan, inputs)
        compare_with_code(plan, launches, module, parameters, inputs)
        vectors.append(Vector(inputs=dict(inputs), sha256=canonical_digest(launches)))
    return tuple(vectors[:STORED_VECTORS])


def compare_with_code(
    plan: LaunchPlan,
    launches: Sequence[Launch],
    module: Module,
    parameters: Sequence[Parameter],
    inputs: Mapping[str, int | float],
) -> None:
    """`launches` equal what the interpreted entry launches for `inputs`.

    Raises: LaunchPlanError that names the first difference.
    """
    try:
        expected = run_entry(module, parameters, inputs)
    except HostRefusedError as refusal:
        raise LaunchPlanError(f"host code refuses inputs that every guard allows ({refusal}): {dict(inputs)}") from None
    ours = [launch for launch in launches if not launch.is_empty]
    theirs = [launch for launch in expected if 0 not in launch.grid]
    if len(ours) != len(theirs):
        raise LaunchPlanError(f"plan makes {len(ours)} launches, host code {len(theirs)}, for {dict(inputs)}")
    for launch, code in zip(ours, theirs, strict=True):
        _compare(launch, code, f"{launch.kernel} for {dict(inputs)}")


def _compare(launch: Launch, code: ConcreteLaunch, place: str) -> None:
    attributes = {_CLUSTER: struct.pack("<3i", 1, 1, 1), _PDL: bytes(4), _COOPERATIVE: bytes(4)}
    attributes |= {id_: data[: len(attributes[id_])] for id_, data in code.attributes.items()}
    ours = {
        "kernel": (launch.kernel, len(launch.params)),
        "sizes": (launch.grid, launch.block, launch.smem, struct.pack("<3i", *launch.cluster)),
        "attributes": (launch.pdl, launch.cooperative),
    }
    theirs = {
        "kernel": (code.kernel, len(code.params)),
        "sizes": (code.grid, code.block, code.smem, attributes[_CLUSTER]),
        "attributes": (any(attributes[_PDL]), any(attributes[_COOPERATIVE])),
    }
    if ours != theirs:
        raise LaunchPlanError(f"plan launches {ours}, host code {theirs}: {place}")
    for i, (param, raw) in enumerate(zip(launch.params, code.params, strict=True)):
        if isinstance(param, BytesParam):
            for at, (a, b, is_written) in enumerate(zip(param.data, raw.data, raw.mask, strict=True)):
                if is_written and (a != b or not param.mask[at]):
                    raise LaunchPlanError(f"parameter {i} byte {at} is {a:#x} in the plan, {b:#x} in the code: {place}")
        else:
            _same_words(
                pack_map(param), struct.unpack(f"<{WORDS}Q", raw.data[: 8 * WORDS]), f"parameter {i} of {place}"
            )


def replay(plan: LaunchPlan) -> LaunchPlan:
    """`plan` itself, if its stored vectors give their digests; LaunchPlanError if not."""
    for i, vector in enumerate(plan.vectors):
        digest = canonical_digest(evaluate(replace(plan, vectors=()), vector.inputs))
        if digest != vector.sha256:
            raise LaunchPlanError(f"vectors[{i}] gives {digest}, stored is {vector.sha256}")
    return plan
