"""The declared matrix: kernels of flash-attn-4 that can be built for each target, and which of them by default.

GQA ratio, mask sides and layout are compile-time facts of these kernels, so they are axes; `when` is the rule by which
the dispatcher tells kernels apart whose other axes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from fa4build.families.flash_attn_4.configuration import (
    BackwardTiles,
    LengthClass,
    backward_tiles,
    forward_cta_group,
    forward_lengths,
    forward_tile_n_sm90,
)
from fa4build.families.kernels import FamilyKernel

MASKS = ("full", "causal", "local")
RATIOS = (1, 4, 8)
MORE_RATIOS = (2, 16)
DTYPES = ("bf16", "fp16")
LAYOUTS = ("dense", "varlen", "paged")
_ALL_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
FORWARD_DIMS = {"sm90a": _ALL_DIMS, "sm100a": _ALL_DIMS, "sm103a": _ALL_DIMS}
COMMON_DIMS = ((64, 64), (128, 128))
SINK_RATIOS = (1, 8)
SOFTCAP = 50.0
SOFTCAP_DIMS = ((128, 128), (256, 256))
SOFTCAP_RATIOS = (1, 2, 4)
BACKWARD_DIMS = {
    "sm90a": ((64, 64), (128, 128), (256, 256)),
    "sm100a": ((64, 64), (128, 128)),
    "sm103a": ((64, 64), (128, 128)),
}
FP8_TARGETS = ("sm100a", "sm103a")
PAGE_SIZE = 128
MORE_PAGE_SIZES = (16, 64)
_FEATURES = ("sink", "softcap")
FUNCTION = "fa4build.families.flash_attn_4.compiling:compile_kernel"


def kernels(arch: str) -> Iterator[FamilyKernel]:
    """Everything declared for one target, forward first."""
    yield from _forwards(arch)
    yield from _splits(arch)
    seen: set[str] = set()
    for kernel in _backwards(arch):
        if kernel.id not in seen:
            seen.add(kernel.id)
            yield kernel


@cache
def _by_id(arch: str) -> dict[str, FamilyKernel]:
    return {kernel.id: kernel for kernel in kernels(arch)}


def declared(kernel_id: str) -> FamilyKernel:
    """The kernel of an id. Raises: KeyError when none is declared under it."""
    return _by_id(kernel_id.split("-")[1])[kernel_id]


def on_request(kernel: FamilyKernel) -> str:
    """Why a declared kernel is built only for those who name it; "" for the default matrix.

    Ratio, pages, sink and cap are compiled in, so that each value of each multiplies the matrix.
    """
    payload = kernel.payload
    is_gpt_oss = payload["head_dim"] == 64 and payload["ratio"] == 8
    if payload["dtype"] == "fp16":
        return "the default matrix is bf16; fp16 would double it"
    if payload["call"] == "forward" and payload["ratio"] in MORE_RATIOS:
        return "the default matrix has 1, 4 and 8 query heads a KV head"
    if payload["layout"] == "paged" and payload["page_size"] != PAGE_SIZE:
        return f"pages of {PAGE_SIZE} are the ones that the library loads by TMA"
    if payload.get("sink") and not is_gpt_oss:
        return "the default matrix has attention sinks for head_dim 64 with 8 query heads a KV head only"
    if payload.get("softcap"):
        return "the cap is compiled in, and the default matrix has none"
    return ""


# --- forward ----------------------------------------------------------------------------------------------------------


def _forwards(arch: str) -> Iterator[FamilyKernel]:
    everywhere = product(DTYPES, FORWARD_DIMS[arch], MASKS, LAYOUTS, RATIOS)
    more_ratios = product(("bf16",), COMMON_DIMS, MASKS, LAYOUTS, MORE_RATIOS)
    for dtype, dims, mask, layout, ratio in (*everywhere, *more_ratios):
        yield from _of_every_length(arch, dtype, dims, mask, layout, ratio)
    if arch in FP8_TARGETS:
        for mask in ("full", "causal"):
            yield from _of_every_length(arch, "e4m3", (128, 128), mask, "dense", 1)
    for dims, mask, ratio, page_size in product(COMMON_DIMS, ("full", "causal"), RATIOS, MORE_PAGE_SIZES):
        yield from _of_every_length(arch, "bf16", dims, mask, "paged", ratio, page_size=page_size)
    for dims, mask, layout, ratio in product(COMMON_DIMS, MASKS, LAYOUTS, SINK_RATIOS):
        yield from _of_every_length(arch, "bf16", dims, mask, layout, ratio, sink=True)
    for dims, mask, layout, ratio in product(SOFTCAP_DIMS, ("causal", "local"), LAYOUTS, SOFTCAP_RATIOS):
        yield from _of_every_length(arch, "bf16", dims, mask, layout, ratio, softcap=SOFTCAP)


def _of_every_length(
    arch: str, dtype: str, dims: tuple[int, int], mask: str, layout: str, ratio: int, **more: Any
) -> Iterator[FamilyKernel]:
    for length in forward_lengths(arch, *dims, mask, layout, ratio):
        yield forward(arch, dtype, dims, mask, layout, ratio, length, **more)


def forward(
    arch: str,
    dtype: str,
    dims: tuple[int, int],
    mask: str,
    layout: str,
    ratio: int,
    length: LengthClass,
    *,
    page_size: int = PAGE_SIZE,
    sink: bool = False,
    softcap: float = 0.0,
) -> FamilyKernel:
    """One forward kernel.

    Dense ones of 16-bit types without further features follow the operator signature `fwd/dense` and are found by the
    functions of `fa4_kernels`; all others by recipe alone. A soft cap is compiled in.
    """
    head_dim, head_dim_v = dims
    cta_group = forward_cta_group(arch, head_dim, head_dim_v, mask, layout, length, page_size)
    features = [*(["sink"] if sink else []), *([f"softcap{softcap:g}"] if softcap else [])]
    pages = [f"p{page_size}"] if layout == "paged" and page_size != PAGE_SIZE else []
    fields = [spell(dims), mask, *_unless(layout, "dense"), *pages, *features, f"r{ratio}", *_unless(length.name, "")]
    payload = {
        "call": "forward",
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "mask": mask,
        "layout": layout,
        "ratio": ratio,
        "rows": length.rows,
        "page_size": page_size,
        "expected": {"cta_group": cta_group},
        **({"sink": True} if sink else {}),
        **({"softcap": softcap} if softcap else {}),
    }
    further = {
        **({"page_size": page_size} if pages else {}),
        **{name: payload[name] for name in _FEATURES if name in payload},
    }
    is_plain = layout == "dense" and dtype in DTYPES and not features
    return FamilyKernel(
        id="-".join(("fwd", arch, dtype, *fields, *(["2cta"] if cta_group == 2 else []))),
        op="fwd" if is_plain else "_".join(("upstream_fwd", layout, *features)),
        arch=arch,
        function=FUNCTION,
        payload=payload,
        axes={
            **_axes(dtype, dims, mask, layout, ratio),
            **further,
            "cta_group": cta_group,
            "when": when(ratio, length.rule),
        },
        tuning=_forward_tuning(arch, dims, mask),
    )


def _forward_tuning(arch: str, dims: tuple[int, int], mask: str) -> dict[str, object]:
    return {"tile_n": forward_tile_n_sm90(*dims, mask) if arch == "sm90a" else 128}


def _splits(arch: str) -> Iterator[FamilyKernel]:
    """Keys divided over blocks, and the kernel that merges the parts: SM100 and later."""
    if arch == "sm90a":
        return
    for dtype, dims, ratio in product(DTYPES, ((64, 64), (128, 128)), RATIOS):
        axes = _axes(dtype, dims, "full", "dense", ratio)
        payload = {
            "call": "split",
            "dtype": dtype,
            "head_dim": dims[0],
            "head_dim_v": dims[1],
            "mask": "full",
            "layout": "dense",
            "ratio": ratio,
            "rows": 128,
            "page_size": PAGE_SIZE,
        }
        yield FamilyKernel(
            id=f"fwd-{arch}-{dtype}-{spell(dims)}-full-split-r{ratio}-decode",
            op="upstream_fwd_split",
            arch=arch,
            function=FUNCTION,
            payload=payload,
            axes={**axes, "split": True},
        )
        if ratio == 1:
            yield FamilyKernel(
                id=f"fwd_combine-{arch}-{dtype}-{spell(dims)}",
                op="upstream_fwd_combine",
                arch=arch,
                function=FUNCTION,
                payload={**payload, "call": "combine"},
                axes={"dtype": dtype, "head_dim_v": dims[1]},
            )


# --- backward ---------------------------------------------------------------------------------------------------------


def _backwards(arch: str) -> Iterator[FamilyKernel]:
    for dtype, dims, mask, ratio in product(DTYPES, BACKWARD_DIMS[arch], MASKS, RATIOS):
        for layout, deterministic in product(("dense", "varlen"), (False, True)):
            if layout == "varlen" and deterministic:
                continue
            yield from backward_chain(arch, dtype, dims, mask, layout, ratio, deterministic)


def backward_chain(
    arch: str, dtype: str, dims: tuple[int, int], mask: str, layout: str, ratio: int, deterministic: bool
) -> tuple[FamilyKernel, ...]:
    """The kernels of one backward in order: row sums, gradients, and fp32 accumulators to `dtype` (dq; dk, dv)."""
    tiles = backward_tiles(arch, *dims, mask)
    payload = {
        "dtype": dtype,
        "head_dim": dims[0],
        "head_dim_v": dims[1],
        "mask": mask,
        "layout": layout,
        "ratio": ratio,
        "deterministic": deterministic,
        "rows": 4096,
        "expected": {"tile_m": tiles.tile_m, "tile_n": tiles.tile_n, "cta_group": tiles.cluster},
    }
    suffix = _unless(layout, "dense")
    main = [spell(dims), mask, *suffix, f"r{ratio}", *(["deterministic"] if deterministic else [])]
    chain = [
        ("bwd_preprocess", [spell(dims), f"m{tiles.tile_m}", *suffix], {"ratio": 1, "deterministic": False}),
        ("bwd", main, {}),
        ("bwd_dq", [spell(dims), *_mask_of_dq(arch, dims, mask), *suffix], {"ratio": 1, "deterministic": False}),
    ]
    if ratio > 1:
        chain.append(("bwd_dkv", [spell(dims), *suffix], {"ratio": 4, "deterministic": False}))
    return tuple(
        FamilyKernel(
            id="-".join((call, arch, dtype, *fields)),
            op=f"upstream_{call}",
            arch=arch,
            function=FUNCTION,
            payload={"call": call, **_shared_mask(arch, call, dims, payload), **changes},
            axes=_axes(dtype, dims, mask if call == "bwd" else "full", layout, ratio if call == "bwd" else 1),
            tuning=_backward_tuning(tiles, call),
        )
        for call, fields, changes in chain
    )


def _backward_tuning(tiles: BackwardTiles, call: str) -> dict[str, object]:
    """What a kernel's tiles are; the keys' rows mean nothing to those that see queries only."""
    return {"tile_m": tiles.tile_m, **({"tile_n": tiles.tile_n} if call in ("bwd", "bwd_dkv") else {})}


def _mask_of_dq(arch: str, dims: tuple[int, int], mask: str) -> list[str]:
    """SM90's tile of queries at head dimension 128 depends on the mask, and so does the order of its dq accumulator."""
    return [f"m{backward_tiles(arch, *dims, mask).tile_m}"]


def _shared_mask(arch: str, call: str, dims: tuple[int, int], payload: dict[str, Any]) -> dict[str, Any]:
    """Kernels that serve several masks are traced with one of them, so that equal kernels have equal payloads."""
    if call == "bwd":
        return payload
    own = backward_tiles(arch, *dims, payload["mask"])
    mask = next(m for m in MASKS if backward_tiles(arch, *dims, m).tile_m == own.tile_m)
    if call == "bwd_dkv":
        mask = "causal"
        own = backward_tiles(arch, *dims, mask)
    expected = {"tile_m": own.tile_m, "tile_n": own.tile_n, "cta_group": own.cluster}
    return payload | {"mask": mask, "expected": expected}


# --- names ------------------------------------------------------------------------------------------------------------


def spell(dims: tuple[int, int]) -> str:
    """`hd128`, or `hd192x128`."""
    return f"hd{dims[0]}" if dims[0] == dims[1] else f"hd{dims[0]}x{dims[1]}"


def when(ratio: int, rule: str = "") -> str:
    """The rule for a kernel of one GQA ratio, and of one class of lengths."""
    heads = f"num_heads_q == {ratio} * num_heads_kv" if ratio > 1 else "num_heads_q == num_heads_kv"
    return f"{heads} and {rule}" if rule else heads


def _axes(dtype: str, dims: tuple[int, int], mask: str, layout: str, ratio: int) -> dict[str, object]:
    return {
        "dtype": dtype,
        "head_dim": dims[0],
        "head_dim_v": dims[1],
        "mask": mask,
        "layout": layout,
        "qhead_per_kvhead": ratio,
    }


def _unless(value: str, default: str) -> list[str]:
    return [] if value == default else [value]
