"""Operators that packs describe: `call("rmsnorm", x=x, weight=w)`, for any family of kernels.

A recipe in a pack's manifest (docs/formats.md, section 5) says which kernels run in which order, with which workspaces.
It is chosen by the dtypes and shapes of the tensors, once for each combination of them; a call then allocates, and
launches on the current stream.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import loader
from .allocation import CAN_ANSWER, Maker, tensor_maker
from .dispatch import evidence_lack, evidence_level
from .errors import InputError, NoKernelError
from .expressions import evaluate
from .packs import Pack, newer_than, newest_of, usable

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
}
# What an axis is when a caller does not name it.
_NEUTRAL = {"mask": "full", "layout": "dense"}
_MAX_BOUND = 4096
_SHOWN_RECIPES = 8

Recipe = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCall:
    """A recipe for tensors of fixed shapes: what to allocate, what to launch.

    Attributes:
        buffers: (name, torch dtype, shape, fill or None).
        steps: (launch object, arguments); an argument is a name, (name,) for the transposed tensor, or a number.
    """

    recipe: str
    pack: str
    buffers: tuple[tuple[str, torch.dtype, tuple[int, ...], float | None], ...]
    steps: tuple[tuple[Any, tuple[Any, ...]], ...]
    results: tuple[str, ...]

    def run(self, tensors: Mapping[str, Any], device: torch.device) -> Any:
        """Allocate, launch, return the results: one tensor, or a tuple."""
        values = dict(tensors)
        for name, dtype, shape, fill in self.buffers:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            values[name] = buffer if fill is None else buffer.fill_(fill)
        for launch, arguments in self.steps:
            launch.run(*[_argument(argument, values) for argument in arguments])
        results = tuple(values[name] for name in self.results)
        return results[0] if len(results) == 1 else results


def _argument(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, str):
        return values[argument]
    return values[argument[0]].transpose(-1, -2) if isinstance(argument, tuple) else argument


_bound: dict[tuple[Any, ...], BoundCall] = loader.remembered("recipe")


def _answer_none(op: str, arguments: Mapping[str, Any]) -> Any:
    return None


# (op, arguments) -> results, or None for a call unlike the earlier ones. It is the launcher's from the first call on.
_answer: Callable[..., Any] = _answer_none


def call(op: str, /, **arguments: Any) -> Any:
    """Run an operator that an installed pack describes.

    Args:
        op: its name, `rmsnorm`.
        arguments: tensors and scalars by the recipe's names; further ones choose among recipes, as `mask="causal"`.
    Returns: the result, or a tuple of results in the recipe's order.
    Contract: tensors are read where they lie; one that a kernel cannot read, by its strides or address, is refused
        with what it needs, and never copied. No gradients are recorded.
    Raises:
        InputError: no tensor was passed, or a guard of a kernel refuses the tensors.
        NoKernelError: no recipe fits, with the reasons.
    """
    answer = _answer(op, arguments)
    if answer is not None:
        return answer
    key, tensors = [op], {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            key.append((name, value.dtype, value.shape, value.device))
        else:
            key.append((name, value))
    bound = _bound.get(tuple(key))
    if bound is None:
        bound = _bind(op, tensors, arguments)
        if len(_bound) >= _MAX_BOUND:
            _bound.clear()
        _bound[tuple(key)] = bound
    device = next(iter(tensors.values())).device
    results = bound.run(tensors, device)
    if CAN_ANSWER:
        _remember(op, arguments, bound, tensors, device)
    return results


def explain_call(op: str, /, **arguments: Any) -> str:
    """Which recipe a `call` would use, and why each other one was refused. Loads and launches nothing."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    ordinal = _ordinal(tensors)
    considered = _considered(op, tensors, arguments, ordinal)
    fitting = [item for item in considered if not item.reasons]
    head = f"{op}: {fitting[0].recipe['id']} from {fitting[0].pack.manifest.pack}" if fitting else f"{op}: none fits"
    return "\n".join((head, *_lines(considered)))


# --- once for each combination of shapes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Considered:
    pack: Pack
    recipe: Recipe
    reasons: tuple[str, ...]
    values: Mapping[str, Any]


def _bind(op: str, tensors: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> BoundCall:
    ordinal = _ordinal(tensors)
    considered = _considered(op, tensors, arguments, ordinal)
    best = next((item for item in considered if not item.reasons), None)
    if best is None:
        known = sorted({recipe["op"] for pack in usable(loader.runtime().packs) for recipe in pack.manifest.recipes})
        lines = _lines(considered) or [f"  installed packs describe: {', '.join(known) or 'no operator'}"]
        raise NoKernelError("\n".join((f"no recipe for {op} fits.", *lines)))
    recipe, values, runtime = best.recipe, best.values, loader.runtime()
    entries = {entry.id: entry for entry in best.pack.manifest.entries}
    named = {tensor["name"] for tensor in (*recipe["inputs"], *recipe["buffers"])}
    steps = tuple(
        (
            runtime.load_as_planned(best.pack, entries[step["kernel"]], ordinal),
            tuple(_bound_argument(text, named, values) for text in step["arguments"]),
        )
        for step in recipe["steps"]
    )
    return BoundCall(
        recipe=recipe["id"],
        pack=best.pack.manifest.pack,
        buffers=tuple(
            (
                buffer["name"],
                _DTYPES[buffer["dtype"]],
                tuple(int(evaluate(str(extent), values)) for extent in buffer["shape"]),
                buffer["fill"],
            )
            for buffer in recipe["buffers"]
        ),
        steps=steps,
        results=tuple(recipe["results"]),
    )


def _bound_argument(text: str, named: set[str], values: Mapping[str, Any]) -> Any:
    if text in named:
        return text
    if text.removesuffix(".transpose") in named:
        return (text.removesuffix(".transpose"),)
    return evaluate(text, values)


def _remember(
    op: str, arguments: dict[str, Any], bound: BoundCall, tensors: Mapping[str, Any], device: torch.device
) -> None:
    """Tell the launcher about a call, which answers the next one like it alone: values are numbered inputs first."""
    index = {name: i for i, name in enumerate((*tensors, *(buffer[0] for buffer in bound.buffers)))}
    makers: dict[torch.dtype, Maker] = {dtype: tensor_maker(dtype, device) for _, dtype, *_ in bound.buffers}
    buffers = tuple((makers[dtype], shape, fill) for _, dtype, shape, fill in bound.buffers)
    steps = tuple((launch, tuple(_numbered(argument, index) for argument in args)) for launch, args in bound.steps)
    calls = loader.compiled_calls("RecipeCalls")
    calls.add(op, arguments, buffers, steps, tuple(index[name] for name in bound.results))
    global _answer
    _answer = calls.run


def _numbered(argument: Any, index: Mapping[str, int]) -> Any:
    """(number of the tensor, whether it is transposed), or a number as it is."""
    if isinstance(argument, str):
        return index[argument], False
    return (index[argument[0]], True) if isinstance(argument, tuple) else argument


def _ordinal(tensors: Mapping[str, torch.Tensor]) -> int:
    """The device of the tensors. Raises: InputError when there is none, or several."""
    if not tensors:
        raise InputError("no tensor was passed; an operator's inputs are passed by name, as x=x")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise InputError(f"tensors are on {', '.join(map(str, devices))}; they must be on one device")
    (device,) = devices
    if loader.serves_cpu():
        return 0
    if device.type != "cuda":
        raise InputError(f"tensors are on {device}; the kernels run on CUDA devices. Move them to one first.")
    return next(iter(tensors.values())).get_device()


def _considered(
    op: str, tensors: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], ordinal: int
) -> list[_Considered]:
    """Every recipe for the op, best first: those that fit, the family asked for, most evidence, then by id."""
    runtime = loader.runtime()
    device = runtime.device(ordinal)
    newest = newest_of((pack, entry) for pack in usable(runtime.packs) for entry in pack.manifest.entries)
    found = []
    for pack in usable(runtime.packs):
        entries = {entry.id: entry for entry in pack.manifest.entries}
        for recipe in pack.manifest.recipes:
            if recipe["op"] != op:
                continue
            kernels = [entries[step["kernel"]] for step in recipe["steps"]]
            reasons, values = _fit(recipe, tensors, arguments, device.sm_count)
            if recipe["target"] != device.target:
                reasons.insert(0, f"is for {recipe['target']}")
            if runtime.evidence is not None:
                lacks = (evidence_lack(kernel, runtime.evidence, runtime.accept_claims) for kernel in kernels)
                reasons += list(filter(None, lacks))[:1]
            level = -1 if reasons else min(map(evidence_level, kernels), default=-1)
            newer = {newer_than(pack, step["kernel"], newest) for step in recipe["steps"]} - {None}
            reasons += [f"is of version {pack.manifest.version}, and {better} has its kernels too" for better in newer]
            order = (len(reasons), pack.manifest.family != runtime.family, -level, recipe["id"])
            item = _Considered(pack=pack, recipe=recipe, reasons=tuple(reasons), values=values)
            found.append((order, item))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _fit(
    recipe: Recipe, tensors: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], sm_count: int
) -> tuple[list[str], dict[str, Any]]:
    """Why a recipe does not fit (empty if it does), and the values of its names."""
    values: dict[str, Any] = {"num_sms": sm_count}
    reasons = _tensor_mismatches(recipe, tensors, values)
    scalars = {scalar["name"]: scalar["default"] for scalar in recipe["scalars"]}
    axes = dict(recipe["axes"])
    for name, value in arguments.items():
        if name in tensors:
            continue
        if name in scalars:
            values[name] = value
        elif name not in axes:
            reasons.append(f"knows no {name}")
        elif axes.pop(name) != value:
            reasons.append(f"{name} is {recipe['axes'][name]}")
    reasons += [f"{name} is {value}" for name, value in axes.items() if value and value != _NEUTRAL.get(name)]
    if reasons:
        return reasons, values
    for name, text in recipe["let"]:
        values[name] = evaluate(text, values)
    for name, default in scalars.items():
        if name not in values and default is None:
            return [f"needs {name}"], values
        if name not in values:
            values[name] = evaluate(default, values)
    if recipe["when"] and not evaluate(recipe["when"], values):
        reasons.append(f"needs {recipe['when']}")
    return reasons, values


def _tensor_mismatches(recipe: Recipe, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> list[str]:
    """Compares tensors with the recipe's inputs, and gives the names of extents their values."""
    inputs = {tensor["name"]: tensor for tensor in recipe["inputs"]}
    reasons = [f"takes no tensor {name}" for name in tensors if name not in inputs]
    for name, described in inputs.items():
        tensor = tensors.get(name)
        if tensor is None:
            reasons.append(f"needs {name}")
        elif tensor.dtype != _DTYPES.get(described["dtype"]):
            reasons.append(f"{name} is {described['dtype']}")
        elif tensor.dim() != len(described["shape"]):
            reasons.append(f"{name} has {len(described['shape'])} dimensions")
        else:
            reasons += _extent_mismatches(name, described["shape"], tensor.shape, values)
    return reasons


def _extent_mismatches(name: str, described: Iterable[Any], shape: Iterable[int], values: dict[str, Any]) -> list[str]:
    reasons = []
    for i, (extent, found) in enumerate(zip(described, shape, strict=True)):
        expected = extent if isinstance(extent, int) else values.setdefault(extent, found)
        if expected != found:
            what = "" if isinstance(extent, int) else f"{extent} = "
            reasons.append(f"{name}.shape[{i}] is {what}{expected}, not {found}")
    return reasons


def _lines(considered: list[_Considered]) -> list[str]:
    lines = [
        f"  {item.recipe['id']} ({item.pack.manifest.pack}): {'; '.join(item.reasons) or 'fits'}"
        for item in considered[:_SHOWN_RECIPES]
    ]
    if len(considered) > _SHOWN_RECIPES:
        lines.append(f"  and {len(considered) - _SHOWN_RECIPES} more, which differ in at least as much")
    return lines
