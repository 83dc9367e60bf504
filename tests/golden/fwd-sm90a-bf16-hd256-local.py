# Specialization fwd-sm90a-bf16-hd256-local, written by fa4build: do not edit.
import cutlass
import cutlass.cute as cute

from kernels_src.forward.sm90 import ForwardSm90

SYMBOL = "fwd_sm90a_bf16_hd256_local"
DTYPE = cutlass.BFloat16
HEAD_DIM = 256
HEAD_DIM_V = 256
MASK = "local"
TILE_M = 128
TILE_N = 64
KV_STAGES = 2
CONSUMER_WARPGROUPS = 2
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
ORDER = "natural"
PERSISTENT = False
SEPARATE_OUTPUT = False
PING_PONG = False
RESCALE_THRESHOLD = 8.0


@cute.jit
def entry(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    softmax_scale: cutlass.Float32,
    window_left: cutlass.Int32,
    window_right: cutlass.Int32,
    num_sms: cutlass.Int32,
    stream,
):
    ForwardSm90(
        symbol=SYMBOL,
        dtype=DTYPE,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM_V,
        mask=MASK,
        tile_m=TILE_M,
        tile_n=TILE_N,
        kv_stages=KV_STAGES,
        consumer_warpgroups=CONSUMER_WARPGROUPS,
        consumer_registers=CONSUMER_REGISTERS,
        producer_registers=PRODUCER_REGISTERS,
        order=ORDER,
        persistent=PERSISTENT,
        separate_output=SEPARATE_OUTPUT,
        ping_pong=PING_PONG,
        rescale_threshold=RESCALE_THRESHOLD,
    )(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        softmax_scale=softmax_scale,
        window_left=window_left,
        window_right=window_right,
        num_sms=num_sms,
        stream=stream,
    )
