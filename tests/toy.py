"""A small kernel with the argument list of the dense forward, and compiles of it. For tests; computes no attention."""

from fa4build.codegen.compile import WORKER, CompileRequest

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


def toy_request(name: str = "toy", *, text: str = TEXT, target: str = "sm_90a", symbol: str = "toy") -> CompileRequest:
    """The compile of a toy; `SYMBOL` in the text becomes its name."""
    return CompileRequest(
        name=name,
        target=target,
        symbol=symbol,
        function=f"{WORKER}:compile_rendered",
        payload={"variant": VARIANT_ID, "module": "toy_kernel.py"},
        files=(("toy_kernel.py", text.replace("SYMBOL", symbol)),),
    )
