"""A small kernel with the argument list of the dense forward, and compiles of it. For tests; computes no attention."""

from fa4build.compiling.compile import WORKER, CompileRequest
from fa4build.compiling.context import context_for
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant

VARIANT_ID = "fwd-sm90a-bf16-hd64-full"

TEXT = """
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32


class Toy:
    def __init__(self, *, symbol: str):
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, q, out, lse, softmax_scale, stream):
        grid = (cute.ceil_div(q.shape[1], 128), q.shape[2], q.shape[0])
        self.kernel(q, out, lse, softmax_scale).launch(grid=grid, block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, softmax_scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        row = block * 128 + thread
        if row < q.shape[1]:
            out[batch, row, head, 0] = (q[batch, row, head, 0].to(Float32) * softmax_scale).to(BFloat16)
            lse[batch, head, row] = softmax_scale


@cute.jit
def entry(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    softmax_scale: Float32, window_left: Int32, window_right: Int32, num_sms: Int32, stream,
):
    Toy(symbol="SYMBOL")(q, out, lse, softmax_scale, stream)
"""

# The same with packed sequences, a sink and a cap: every kind of argument that a signature may have.
PACKED_ID = "fwd-sm90a-bf16-hd64-full-varlen-softcap-sink"
PACKED_TEXT = """
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32


class Toy:
    def __init__(self, *, symbol: str):
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(
        self, *, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table=None, sink=None,
        softmax_scale, window_left, window_right, num_sms, softcap=None, stream,
    ):
        grid = (cute.ceil_div(q.shape[0], 128), q.shape[1], cu_seqlens_q.shape[0] - 1)
        self.kernel(q, out, cu_seqlens_q, seqused_q, page_table, sink, softcap).launch(
            grid=grid, block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, out: cute.Tensor, cu_seqlens_q: cute.Tensor, seqused_q: cute.Tensor,
        page_table: cute.Tensor | None, sink: cute.Tensor | None, softcap: Float32 | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        row = block * 128 + thread
        length = cu_seqlens_q[batch + 1] - cu_seqlens_q[batch]
        if seqused_q.shape[0] > 0:
            length = seqused_q[batch]
        value = Float32(0.0)
        if cutlass.const_expr(sink is not None):
            value = sink[head]
        if cutlass.const_expr(softcap is not None):
            value = value + softcap
        if cutlass.const_expr(page_table is not None):
            value = value + page_table[0, 0]
        if row < length:
            out[cu_seqlens_q[batch] + row, head, 0] = value.to(BFloat16)


@cute.jit
def entry(PARAMETERS):
    Toy(symbol="SYMBOL")(ARGUMENTS)
"""


def packed_text() -> str:
    """PACKED_TEXT with the arguments that a template would be given."""
    variant = parse_variant(PACKED_ID)
    values = context_for(variant, tuning_for(variant))
    return PACKED_TEXT.replace("PARAMETERS", values["parameters"]).replace("ARGUMENTS", values["arguments"])


def toy_request(
    name: str = "toy",
    *,
    text: str = TEXT,
    target: str = "sm_90a",
    symbol: str = "toy",
    variant_id: str = VARIANT_ID,
) -> CompileRequest:
    """The compile of a toy; `SYMBOL` in the text becomes its name."""
    return CompileRequest(
        name=name,
        target=target,
        symbol=symbol,
        function=f"{WORKER}:compile_rendered",
        payload={"variant": variant_id, "module": "toy_kernel.py"},
        files=(("toy_kernel.py", text.replace("SYMBOL", symbol)),),
    )
