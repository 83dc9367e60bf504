"""From the attention of a model's layers and a use to the problems that kernels must answer.

A problem here is what the runtime's own dispatcher is asked (`dispatch.Problem`), so that a plan and a call cannot
differ in what they look for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..dispatch import Problem, steps_of
from ..errors import InputError
from ..splitting import Keys, Rows, chosen_splits, key_blocks, visible_keys
from .gpus import Gpu
from .layers import Attention, Model, Part

SERVING, TRAINING = "serving", "training"
KERNEL_DTYPES = ("bf16", "fp16", "e4m3", "e5m2")
_CACHE_DTYPES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "bfloat16": "bf16", "float16": "fp16"}
_WINDOW_OPEN = 1 << 30
_BATCHES = (1, 2, 4, 8, 16, 32)  # of decoding, in which splitting keys is looked for
_LONG_CONTEXT = 131_072  # keys, where a configuration names no number of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a model is run for.

    Attributes:
        purpose: `serving` or `training`.
        page_size: keys a page of the cache; None: a cache without pages.
        cache_dtype: of the cached keys and values, and of queries with them; None: the model's own.
        query_rows: tokens of a sequence that a decoding step asks for: 1, more with speculation.
        deterministic: gradients are the same in each run.
        tensor_parallel: ranks that share the heads.
    """

    purpose: str = SERVING
    page_size: int | None = None
    cache_dtype: str | None = None
    query_rows: int = 1
    deterministic: bool = False
    tensor_parallel: int = 1

    def __str__(self) -> str:
        if self.purpose == TRAINING:
            return "training, deterministic" if self.deterministic else "training"
        pages = f"pages of {self.page_size}" if self.page_size else "a cache without pages"
        return f"serving, {pages}"


def checked_use(use: Use) -> Use:
    """The use with its cache dtype as kernels name it. Raises: InputError for a value that cannot be."""
    if use.purpose not in (SERVING, TRAINING):
        raise InputError(f"use {use.purpose!r} is unknown. Allowed: {SERVING}, {TRAINING}.")
    for name, value in (
        ("page_size", use.page_size),
        ("query_rows", use.query_rows),
        ("tensor_parallel", use.tensor_parallel),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; at least 1 is expected.")
    if use.cache_dtype is None:
        return use
    named = use.cache_dtype.lower()
    dtype = _CACHE_DTYPES.get(named, named)
    if dtype not in KERNEL_DTYPES:
        raise InputError(f"cache dtype {use.cache_dtype!r} is unknown. Allowed: {', '.join(KERNEL_DTYPES)}, fp8.")
    return replace(use, cache_dtype=dtype)


class Need(NamedTuple):
    """A problem, the calls that ask it, and how many layers do."""

    problem: Problem
    why: str
    layers: int


class Lack(NamedTuple):
    """Something that no kernel can be asked for, and how many layers it concerns."""

    reason: str
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNeeds:
    """What one part of a model asks for. `heads`: (query, KV) heads a rank, of each kind of layer in turn."""

    part: Part
    needs: tuple[Need, ...]
    lacks: tuple[Lack, ...]
    notes: tuple[str, ...]


def needs_of(model: Model, gpu: Gpu, use: Use) -> tuple[PartNeeds, ...]:
    """What each part of a model asks for on a GPU, in the order of its layers.

    Raises: InputError for a use that the model's heads do not allow.
    """
    return tuple(_needs_of_part(part, model, gpu, use) for part in model.parts)


def _needs_of_part(part: Part, model: Model, gpu: Gpu, use: Use) -> PartNeeds:
    for attention in part.kinds():
        heads_per_rank(attention, use.tensor_parallel)
    needs: list[Need] = []
    lacks = [Lack(part.unknown, part.num_layers)] if part.unknown else []
    for attention, layers in part.kinds().items():
        reason = attention.unserved or _dtype_lack(attention, model, gpu, use)
        if reason:
            lacks.append(Lack(reason, layers))
            continue
        found = (
            _training(attention, model, use) if use.purpose == TRAINING else _serving(attention, part, model, gpu, use)
        )
        needs += [Need(problem, why, layers) for problem, why in found]
    return PartNeeds(part=part, needs=tuple(needs), lacks=tuple(lacks), notes=part.notes)


def heads_per_rank(attention: Attention, ranks: int) -> tuple[int, int]:
    """(query heads, KV heads) of a rank; KV heads are copied where there are fewer than ranks.

    Raises: InputError where heads cannot be shared evenly.
    """
    heads_q, heads_kv = attention.heads_q, attention.heads_kv
    is_even = heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)
    if not is_even:
        raise InputError(
            f"{heads_q} query heads on {heads_kv} KV heads cannot be shared by {ranks} ranks evenly. Choose a number "
            "that divides both, or one that the KV heads divide."
        )
    return heads_q // ranks, max(1, heads_kv // ranks)


def _dtype_of(attention: Attention, model: Model, use: Use) -> str:
    """Of q, k and v in a call: that of the cache where there is one, since kernels take one dtype."""
    is_cached = attention.has_cache and not attention.is_cross and use.purpose == SERVING
    return (use.cache_dtype or model.cache_dtype) if is_cached else model.dtype


def _dtype_lack(attention: Attention, model: Model, gpu: Gpu, use: Use) -> str:
    dtype = _dtype_of(attention, model, use)
    if dtype not in KERNEL_DTYPES:
        return f"keys and values are cached as {dtype}, which no kernel reads"
    if dtype in ("e4m3", "e5m2") and gpu.target == "sm_90a":
        return f"the cache is {dtype}, and fp8 kernels need compute capability 10.0; choose --cache-dtype {model.dtype}"
    return ""


# --- serving ----------------------------------------------------------------------------------------------------------

_Found = Iterator[tuple[Problem, str]]


def _problem(attention: Attention, dtype: str, layout: str, **more: object) -> Problem:
    features = {"softcap"} if attention.softcap else set()
    features |= {"sink"} if attention.sink else set()
    return Problem(
        layout=layout,
        dtype=dtype,
        head_dim=attention.head_dim,
        head_dim_v=attention.head_dim_v,
        mask=attention.mask,
        features=frozenset(features),
        **more,  # type: ignore[arg-type]
    )


_LAYOUT_WORDS = {"dense": "batches of one length", "varlen": "packed sequences", "paged": "pages"}


def _serving(attention: Attention, part: Part, model: Model, gpu: Gpu, use: Use) -> _Found:
    """The forward for whole prompts, and where keys are cached, for decoding."""
    dtype = _dtype_of(attention, model, use)
    is_paged = use.page_size is not None and attention.has_cache and not attention.is_cross
    layouts = ("paged",) if is_paged else ("dense", "varlen")
    what = "prefill and decoding" if attention.has_cache else "forward"
    for layout in layouts:
        yield _problem(attention, dtype, layout), f"{what}, {_LAYOUT_WORDS[layout]}"
    if not attention.has_cache or not splits_keys(attention, part, gpu, use, dtype):
        return
    layout = layouts[-1]
    problem = _problem(attention, dtype, layout)
    parts, merge = steps_of(replace(problem, features=problem.features | {"split"}))
    yield parts, f"decoding with split-KV, {_LAYOUT_WORDS[layout]}"
    yield merge, "merges KV splits"


def splits_keys(attention: Attention, part: Part, gpu: Gpu, use: Use, dtype: str) -> bool:
    """Whether the runtime would divide the keys of some decoding step: few queries over many keys."""
    heads_q, heads_kv = heads_per_rank(attention, use.tensor_parallel)
    tokens = (part.max_source_tokens if attention.is_cross else part.max_tokens) or _LONG_CONTEXT
    left, right = attention.window or (None, None)
    window = (_WINDOW_OPEN if left is None else left, _WINDOW_OPEN if right is None else right)
    seen = visible_keys(window, use.query_rows, tokens) if attention.window else tokens
    element_bytes = 1 if dtype in ("e4m3", "e5m2") else 2
    keys = Keys(key_blocks(seen), (attention.head_dim, attention.head_dim_v), element_bytes, attention.mask)
    shapes = (Rows(batch, batch * use.query_rows, use.query_rows, heads_q, heads_kv) for batch in _BATCHES)
    major = gpu.compute_capability[0]
    return any(chosen_splits(shape, keys, num_sms=gpu.num_sms, major=major) > 1 for shape in shapes)


# --- training ---------------------------------------------------------------------------------------------------------


def _training(attention: Attention, model: Model, use: Use) -> _Found:
    """Forward and the three launches of the backward, for batches of one length and for packed sequences.

    As gradients.py: a sink has no part in the backward's kernels, and the helpers know neither mask nor soft cap.
    """
    for layout in ("dense", "varlen"):
        words = _LAYOUT_WORDS[layout]
        forward = _problem(attention, model.dtype, layout)
        yield forward, f"forward, {words}"
        features = forward.features - {"sink"}
        backward = replace(forward, op="bwd", features=features, deterministic=use.deterministic)
        yield backward, f"backward, {words}"
        for helper, why in helpers_of(backward):
            yield helper, f"{why}, {words}"


def helpers_of(problem: Problem) -> tuple[tuple[Problem, str], ...]:
    """What a problem is launched together with, and what for: the merge of split keys, both sides of a backward."""
    if problem.op == "bwd":
        plain = replace(problem, mask="full", deterministic=False, features=frozenset())
        return (
            (replace(plain, op="bwd_preprocess"), "before the backward"),
            (replace(plain, op="bwd_postprocess", head_dim_v=problem.head_dim), "after the backward"),
        )
    if problem.op == "fwd" and "split" in problem.features:
        return ((steps_of(problem)[1], "merges KV splits"),)
    return ()


def use_as_options(use: Use) -> str:
    """A use as the builder's commands take it: `--page-size 16 --cache-dtype e4m3`."""
    given = (
        ("--for", use.purpose if use.purpose != SERVING else None),
        ("--page-size", use.page_size),
        ("--cache-dtype", use.cache_dtype),
        ("--query-rows", use.query_rows if use.query_rows != 1 else None),
        ("--tp", use.tensor_parallel if use.tensor_parallel != 1 else None),
    )
    words = [f"{name} {value}" for name, value in given if value is not None]
    return " ".join(words + (["--deterministic"] if use.deterministic else []))
