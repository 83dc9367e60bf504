"""A launch plan as text for people: let-bindings for what is used more than once, infix for the rest."""

from __future__ import annotations

from fa4build.plan.builder import roots
from fa4build.plan.evaluation import const_value
from fa4build.plan.values import BytesTemplate, LaunchPlan, LaunchTemplate, TensorMapTemplate, result_type

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "ashr": ">>", "lshr": ">>>"},
    **{"sdiv": "/", "udiv": "/u", "srem": "%", "urem": "%u", "eq": "==", "ne": "!="},
    **{"slt": "<", "sle": "<=", "sgt": ">", "sge": ">=", "ult": "<u", "ule": "<=u", "ugt": ">u", "uge": ">=u"},
    **{
        "fadd": "+",
        "fsub": "-",
        "fmul": "*",
        "fdiv": "/",
        "feq": "==",
        "flt": "<",
        "fle": "<=",
        "fgt": ">",
        "fge": ">=",
    },
}
_MAX_INLINE = 60  # characters: a longer expression gets a name even when it is used once


class _Names:
    """Text of every node; `bindings` collects the lets in order."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.bindings: list[str] = []
        self._texts: list[str] = []
        uses = _use_counts(plan)
        for index, node in enumerate(plan.nodes):
            text = self._expression(node)
            is_leaf = node[0] in ("in", "const")
            if not is_leaf and uses[index] and (uses[index] > 1 or len(text) > _MAX_INLINE):
                self.bindings.append(f"  let t{index}: {result_type(node)} = {text}")
                text = f"t{index}"
            self._texts.append(text)

    def __getitem__(self, index: int) -> str:
        text = self._texts[index]
        return text[1:-1] if text.startswith("(") and _encloses(text) else text

    def _expression(self, node: tuple) -> str:
        op = node[0]
        if op == "in":
            return node[2]
        if op == "const":
            return repr(const_value(node))
        operands = [self._texts[i] for i in node[2:]]
        if op == "add" and operands[1].startswith("-"):
            return f"({operands[0]} - {operands[1][1:]})"
        if op in _INFIX:
            return f"({operands[0]} {_INFIX[op]} {operands[1]})"
        if op == "select":
            return f"({operands[0]} ? {operands[1]} : {operands[2]})"
        inner = ", ".join(operands)
        return f"{op}.{node[1]}({inner})" if len(operands) == 1 and op not in ("clog2", "ctlz") else f"{op}({inner})"


def _encloses(text: str) -> bool:
    """True when the first parenthesis closes at the very end."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i == len(text) - 1
    return False


def _use_counts(plan: LaunchPlan) -> list[int]:
    counts = [0] * len(plan.nodes)
    for index in roots(plan):
        counts[index] += 1
    for index in reversed(range(len(plan.nodes))):
        node = plan.nodes[index]
        if counts[index] and node[0] not in ("in", "const"):
            for operand in node[2:]:
                counts[operand] += 1
    return counts


def _render_map(param: TensorMapTemplate, names: _Names) -> str:
    dims = ", ".join(names[i] for i in param.dims)
    strides = ", ".join(names[i] for i in param.strides)
    traits = f"box={list(param.box)} swizzle={param.swizzle} l2={param.l2_promotion} oob={param.oob_fill}"
    traits += f" elem_strides={list(param.elem_strides)}" if set(param.elem_strides) != {1} else ""
    traits += f" interleave={param.interleave}" if param.interleave else ""
    return f"tmap {param.dtype} at {names[param.addr]} dims=[{dims}] byte_strides=[{strides}] {traits}"


def _render_launch(launch: LaunchTemplate, names: _Names) -> list[str]:
    lines = [
        f"launch {launch.kernel}",
        f"  grid = ({', '.join(names[i] for i in launch.grid)})",
        f"  block = {launch.block}  cluster = {launch.cluster}  smem = {launch.smem}"
        + ("  pdl" if launch.pdl else "")
        + ("  cooperative" if launch.cooperative else ""),
    ]
    for i, param in enumerate(launch.params):
        if isinstance(param, BytesTemplate):
            fields = ", ".join(f"{offset}: {names[node]}" for offset, node in param.fields)
            lines.append(f"  param {i}: {param.size} bytes, align {param.align} {{{fields}}}")
        else:
            lines.append(f"  param {i}: {_render_map(param, names)}")
    return lines


def render_plan(plan: LaunchPlan) -> str:
    """The plan as a readable text in terms of the caller's arguments. Nothing parses it back."""
    names = _Names(plan)
    lines = [f"launch plan, {plan.origin['kind']}" + (f" for {plan.origin['arch']}" if "arch" in plan.origin else "")]
    lines.append("args " + ", ".join(f"{a.name}: {a.dtype}" + (f"[{a.rank}d]" if a.rank else "") for a in plan.args))
    lines += [f"spec {key} = {value!r}" for key, value in sorted(plan.spec.items())]
    lines += names.bindings
    lines += [f"guard {names[guard.expr]}  ({guard.source}: {guard.message})" for guard in plan.guards]
    for launch in plan.launches:
        lines += _render_launch(launch, names)
    return "\n".join(lines) + "\n"
