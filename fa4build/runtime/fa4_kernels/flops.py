"""Floating-point operations of the operators, as torch.utils.flop_counter counts attention: two for a multiplication
with its addition, masks left out of account, five products in a backward pass where the forward has two.

Registered when a mode of torch first sees a call, because importing the counter takes 0.3 s.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

_is_registered = False


def register() -> None:
    """Let torch's flop counter know the operators, if it is loaded, and every counter that is counting now."""
    global _is_registered
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    if not _is_registered:
        _is_registered = True
        counter.flop_registry.update(_formulas())
    for i in range(torch._C._len_torch_dispatch_stack()):
        counting = getattr(torch._C._get_dispatch_stack_at(i), "counter", None)
        if hasattr(counting, "flop_registry"):
            counting.flop_registry.update(_formulas())


def _formulas() -> dict[Any, Any]:
    operators = torch.ops.fa4_kernels
    return {
        operators.attention: _dense_forward,
        operators.attention_backward: _dense_backward,
        operators.general_attention: _general_forward,
        operators.general_attention_backward: _general_backward,
    }


def _products(shapes: tuple[int, int, int, int, int], *, over_head_dim: int, over_head_dim_v: int) -> int:
    """Of (sequences, heads, queries, keys) scores: so many products with head_dim, and with head_dim_v."""
    num_scores, head_dim, head_dim_v = shapes[0] * shapes[1] * shapes[2], shapes[3], shapes[4]
    return 2 * num_scores * (over_head_dim * head_dim + over_head_dim_v * head_dim_v)


def _dense_shapes(q: Any, k: Any, v: Any) -> tuple[int, int, int, int, int]:
    return q.shape[0] * q.shape[2], q.shape[1], k.shape[1], q.shape[3], v.shape[3]


def _dense_forward(q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return _products(_dense_shapes(q, k, v), over_head_dim=1, over_head_dim_v=1)


def _dense_backward(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return _products(_dense_shapes(q, k, v), over_head_dim=3, over_head_dim_v=2)


def _general_shapes(q: Any, k: Any, v: Any, lists: tuple[Any, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each sequence. Lists are read from their device here, as torch's own formulas do; counting is no hot path."""
    cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k = lists
    if cu_seqlens_q is None:
        yield _dense_shapes(q, k, v)
        return
    heads, dims = q.shape[1], (q.shape[2], v.shape[-1])
    queries = _lengths(cu_seqlens_q, seqused_q, q.shape[0])
    longest = k.shape[0] if page_table is None else page_table.shape[1] * k.shape[1]
    keys = _lengths(cu_seqlens_k, seqused_k, longest)
    for num_queries, num_keys in zip(queries, keys, strict=True):
        yield heads, num_queries, num_keys, *dims


def _lengths(starts: Any, used: Any, longest: int) -> list[int]:
    """Of the sequences; where lists hold no numbers (fake tensors), the most that the shapes allow."""
    given = starts if used is None else used
    count = given.shape[0] - (used is None)
    if type(given) is not torch.Tensor or given.is_meta:
        return [longest] * count
    return (given.diff() if used is None else given).tolist()


def _general_forward(q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    shapes = _general_shapes(q, k, v, rest[:5])
    return sum(_products(each, over_head_dim=1, over_head_dim_v=1) for each in shapes)


def _general_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, out_val: Any = None, **named: Any
) -> int:
    shapes = _general_shapes(q, k, v, rest[:5])
    return sum(_products(each, over_head_dim=3, over_head_dim_v=2) for each in shapes)


for _formula in (_dense_forward, _dense_backward, _general_forward, _general_backward):
    _formula._get_raw = True  # type: ignore[attr-defined]  # with tensors, not with shapes
