"""How operators are called with the kernels of flash-attn-4: order, workspaces, zero fills, argument lists.

The operators are `fwd` (layouts dense, varlen, paged; `split`) and `bwd` (dense, varlen). Padding follows the
library's interface: rows are rounded up to whole tiles, head dimensions to `dim_multiple`, packed sequences each to a
tile of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa4build.families.flash_attn_4.configuration import backward_tiles
from fa4build.families.flash_attn_4.matrix import backward_chain, when
from fa4build.families.interface import Buffer, Input, OpRecipe, Scalar, Step
from fa4build.families.kernels import FamilyKernel
from fa4build.matrix.arch import arch_named

_SCALE = Scalar(name="softmax_scale", default="head_dim ** -0.5")
_WINDOW = (Scalar(name="window_left", default="2 ** 30"), Scalar(name="window_right", default="2 ** 30"))
_SINK = Input(name="sink", dtype="bf16", shape=("num_heads_q",))
_OUTPUT = {"e4m3": "bf16", "e5m2": "bf16"}


def op_recipes(built: Sequence[FamilyKernel]) -> tuple[OpRecipe, ...]:
    """Every operator whose kernels are all among `built`."""
    ids = {kernel.id for kernel in built}
    recipes: list[OpRecipe] = []
    for kernel in built:
        call = kernel.payload["call"]
        if call == "forward":
            recipes.append(_forward(kernel))
        elif call == "split":
            recipes.append(_split(kernel))
        elif call == "bwd":
            recipes.append(_backward(kernel))
    return tuple(recipe for recipe in recipes if ids.issuperset(step.kernel for step in recipe.steps))


def _axes(kernel: FamilyKernel) -> dict[str, object]:
    """What a caller asks for by name. Dtype and head dimensions are those of the inputs."""
    payload = kernel.payload
    softcap = {"softcap": payload["softcap"]} if payload.get("softcap") else {}
    return {"mask": payload["mask"], "layout": payload["layout"], "split": payload["call"] == "split", **softcap}


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(kernel: FamilyKernel) -> OpRecipe:
    payload = kernel.payload
    layout, is_local = payload["layout"], payload["mask"] == "local"
    extra = {"dense": (), "varlen": ("cu_seqlens_q", "cu_seqlens_k"), "paged": ("seqused_k", "page_table")}[layout]
    needs_length = kernel.arch != "sm90a" and layout == "varlen"
    lengths = (Scalar(name="max_seqlen_q", default="total_q"),) if layout == "varlen" else ()
    arguments = ("q", "k", "v", "out", "lse", "softmax_scale", *extra)
    arguments += ("window_left", "window_right") if is_local else ()
    arguments += ("sink",) if payload.get("sink") else ()
    rows = ("total_q",) if layout == "varlen" else ("batch", "seqlen_q")
    lse = ("num_heads_q", "total_q") if layout == "varlen" else ("batch", "num_heads_q", "seqlen_q")
    out_dtype = _OUTPUT.get(payload["dtype"], payload["dtype"])
    return OpRecipe(
        id=kernel.id,
        op="fwd",
        target=arch_named(kernel.arch).target,
        axes=_axes(kernel),
        when=str(kernel.axes["when"]),
        inputs=(*_qkv(kernel), *_extra_inputs(layout), *((_SINK,) if payload.get("sink") else ())),
        scalars=(_SCALE, *(_WINDOW if is_local else ()), *lengths),
        let=(("head_dim", str(payload["head_dim"])),),
        buffers=(
            Buffer(name="out", dtype=out_dtype, shape=(*rows, "num_heads_q", str(payload["head_dim_v"]))),
            Buffer(name="lse", dtype="f32", shape=lse),
        ),
        steps=(Step(kernel=kernel.id, arguments=arguments + (("max_seqlen_q",) if needs_length else ())),),
        results=("out", "lse"),
    )


def _qkv(kernel: FamilyKernel) -> tuple[Input, ...]:
    payload = kernel.payload
    dtype, layout = payload["dtype"], payload["layout"]
    rows_q: tuple[str | int, ...] = ("total_q",) if layout == "varlen" else ("batch", "seqlen_q")
    rows_k: tuple[str | int, ...] = {
        "dense": ("batch", "seqlen_k"),
        "varlen": ("total_k",),
        "paged": ("num_pages", payload.get("page_size", 0)),
    }[layout]
    return (
        Input(name="q", dtype=dtype, shape=(*rows_q, "num_heads_q", payload["head_dim"])),
        Input(name="k", dtype=dtype, shape=(*rows_k, "num_heads_kv", payload["head_dim"])),
        Input(name="v", dtype=dtype, shape=(*rows_k, "num_heads_kv", payload["head_dim_v"])),
    )


def _extra_inputs(layout: str) -> tuple[Input, ...]:
    starts = tuple(Input(name=f"cu_seqlens_{x}", dtype="i32", shape=("batch_plus_1",)) for x in ("q", "k"))
    pages = (
        Input(name="page_table", dtype="i32", shape=("batch", "max_pages")),
        Input(name="seqused_k", dtype="i32", shape=("batch",)),
    )
    return {"dense": (), "varlen": starts, "paged": pages}[layout]


def _split(kernel: FamilyKernel) -> OpRecipe:
    """Partial results of `num_splits` parts of the keys, then one merge. lse comes out transposed, as it is stored."""
    payload = kernel.payload
    ratio, dim_v = payload["ratio"], str(payload["head_dim_v"])
    part = kernel.id.split("-")
    combine = "-".join(("fwd_combine", *part[1:4]))
    return OpRecipe(
        id=kernel.id,
        op="fwd",
        target=arch_named(kernel.arch).target,
        axes=_axes(kernel),
        when=when(ratio, f"seqlen_q * {ratio} <= 128 and 1 < num_splits and num_splits <= 32"),
        inputs=_qkv(kernel),
        scalars=(_SCALE, Scalar(name="num_splits")),
        let=(("head_dim", str(payload["head_dim"])),),
        buffers=(
            Buffer(name="out", dtype=payload["dtype"], shape=("batch", "seqlen_q", "num_heads_q", dim_v)),
            Buffer(name="lse", dtype="f32", shape=("batch", "num_heads_q", "seqlen_q")),
            Buffer(name="out_part", dtype="f32", shape=("num_splits", "batch", "seqlen_q", "num_heads_q", dim_v)),
            Buffer(name="lse_part", dtype="f32", shape=("num_splits", "batch", "num_heads_q", "seqlen_q")),
        ),
        steps=(
            Step(
                kernel=kernel.id,
                arguments=("q", "k", "v", "out_part", "lse_part", "softmax_scale", "seqlen_q"),
            ),
            Step(kernel=combine, arguments=("out_part", "lse_part.transpose", "out", "lse.transpose")),
        ),
        results=("out", "lse"),
    )


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(kernel: FamilyKernel) -> OpRecipe:
    payload = kernel.payload
    dims = (payload["head_dim"], payload["head_dim_v"])
    chain = backward_chain(
        kernel.arch,
        payload["dtype"],
        dims,
        payload["mask"],
        payload["layout"],
        payload["ratio"],
        payload["deterministic"],
    )
    shapes = _BackwardShapes(kernel)
    is_local, is_varlen = payload["mask"] == "local", payload["layout"] == "varlen"
    starts_q, starts_k = (("cu_seqlens_q",), ("cu_seqlens_k",)) if is_varlen else ((), ())
    dk, dv = ("dk_accum", "dv_accum") if payload["ratio"] > 1 else ("dk", "dv")
    main = ("q", "k", "v", "dout", "lse_log2", "dpsum", "dq_accum", dk, dv, "softmax_scale", *starts_q, *starts_k)
    main += ("window_left", "window_right") if is_local else ()
    main += tuple(buffer.name for buffer in shapes.semaphores())
    preprocess, _, dq, *dkv = (part.id for part in chain)
    steps = [
        Step(kernel=preprocess, arguments=("out", "dout", "dpsum", "lse", "lse_log2", "dq_accum", *starts_q, "1.0")),
        Step(kernel=kernel.id, arguments=main),
        Step(kernel=dq, arguments=("dq_accum", "dq", "softmax_scale", *starts_q)),
    ]
    for post in dkv:
        steps.append(Step(kernel=post, arguments=("dk_accum", "dk", "softmax_scale", *starts_k)))
        steps.append(Step(kernel=post, arguments=("dv_accum", "dv", "1.0", *starts_k)))
    return OpRecipe(
        id=kernel.id,
        op="bwd",
        target=arch_named(kernel.arch).target,
        axes={**_axes(kernel), "deterministic": payload["deterministic"]},
        when=when(payload["ratio"]),
        inputs=(*_qkv(kernel), *shapes.results_of_forward(), *_extra_inputs(payload["layout"])),
        scalars=(_SCALE, *(_WINDOW if is_local else ())),
        let=shapes.let(),
        buffers=shapes.buffers(),
        steps=tuple(steps),
        results=("dq", "dk", "dv"),
    )


class _BackwardShapes:
    """Extents of everything a backward allocates, as expressions."""

    def __init__(self, kernel: FamilyKernel) -> None:
        self._kernel, self._payload = kernel, kernel.payload
        self._dims = (self._payload["head_dim"], self._payload["head_dim_v"])
        self._tiles = backward_tiles(kernel.arch, *self._dims, self._payload["mask"])
        self._is_varlen = self._payload["layout"] == "varlen"

    def let(self) -> tuple[tuple[str, str], ...]:
        """Rounded extents. Packed sequences start at whole tiles, for which each sequence gets a spare one."""
        tiles, (head_dim, head_dim_v) = self._tiles, self._dims
        keys = tiles.tile_n * tiles.cluster
        if self._is_varlen:
            rows = (
                ("rows_q", f"(total_q + batch_plus_1 * {tiles.tile_m} - 1) // {tiles.tile_m} * {tiles.tile_m}"),
                ("rows_k", f"(total_k + batch_plus_1 * {keys} - 1) // {keys} * {keys}"),
            )
        else:
            rows = (
                ("rows_q", f"round_up(seqlen_q, {tiles.tile_m})"),
                ("rows_k", f"round_up(seqlen_k, {keys})"),
            )
        return (
            ("head_dim", str(head_dim)),
            *rows,
            ("dim_rounded", f"round_up({head_dim}, {tiles.dim_multiple})"),
            ("dim_v_rounded", f"round_up({head_dim_v}, {tiles.dim_multiple})"),
        )

    def results_of_forward(self) -> tuple[Input, ...]:
        """out, dout and lse."""
        rows = ("total_q",) if self._is_varlen else ("batch", "seqlen_q")
        lse = ("num_heads_q", "total_q") if self._is_varlen else ("batch", "num_heads_q", "seqlen_q")
        dtype = self._payload["dtype"]
        return (
            Input(name="out", dtype=dtype, shape=(*rows, "num_heads_q", self._dims[1])),
            Input(name="dout", dtype=dtype, shape=(*rows, "num_heads_q", self._dims[1])),
            Input(name="lse", dtype="f32", shape=lse),
        )

    def buffers(self) -> tuple[Buffer, ...]:
        """Gradients, row sums and accumulators; what kernels add to starts at zero."""
        dtype, batch = self._payload["dtype"], () if self._is_varlen else ("batch",)
        rows_q = ("total_q",) if self._is_varlen else ("batch", "seqlen_q")
        rows_k = ("total_k",) if self._is_varlen else ("batch", "seqlen_k")
        head_dim, head_dim_v = map(str, self._dims)
        heads_q, heads_k = (*batch, "num_heads_q"), (*batch, "num_heads_kv")
        found = [
            Buffer(name="dq", dtype=dtype, shape=(*rows_q, "num_heads_q", head_dim)),
            Buffer(name="dk", dtype=dtype, shape=(*rows_k, "num_heads_kv", head_dim)),
            Buffer(name="dv", dtype=dtype, shape=(*rows_k, "num_heads_kv", head_dim_v)),
            Buffer(name="dq_accum", dtype="f32", shape=(*heads_q, "rows_q * dim_rounded")),
            Buffer(name="dpsum", dtype="f32", shape=(*heads_q, "rows_q")),
            Buffer(name="lse_log2", dtype="f32", shape=(*heads_q, "rows_q")),
        ]
        if self._payload["ratio"] > 1:
            found += [
                Buffer(name="dk_accum", dtype="f32", shape=(*heads_k, "rows_k * dim_rounded"), fill=0.0),
                Buffer(name="dv_accum", dtype="f32", shape=(*heads_k, "rows_k * dim_v_rounded"), fill=0.0),
            ]
        return (*found, *self.semaphores())

    def semaphores(self) -> tuple[Buffer, ...]:
        """Turns of the blocks that add to one tile, where gradients are deterministic; dense layouts only."""
        if not self._payload["deterministic"]:
            return ()
        tiles = self._tiles
        turns = ("batch", "num_heads_q", f"rows_q // {tiles.tile_m}", str(tiles.cluster))
        found = [Buffer(name="dq_semaphore", dtype="i32", shape=turns, fill=0)]
        if self._payload["ratio"] > 1:
            keys = ("batch", "num_heads_kv", f"rows_k // {tiles.tile_n}", "2")
            found += [Buffer(name=f"{x}_semaphore", dtype="i32", shape=keys, fill=0) for x in ("dk", "dv")]
        return tuple(found)
