"""What the toy kernels' host functions must launch, written down from their definition in plain Python.

Nothing of the extractor or of the plan is used: parameters are built with `struct` from shapes and strides, fast
divisors from their definition, tensor maps as the arguments of cuTensorMapEncodeTiled.
"""

import math
import struct


def fast_divisor(n: int) -> bytes:
    """CuTe's 32-bit fast divisor, 12 bytes of which the last 2 are undefined (0 here); n from 1 to 2**31 - 1.

    l = ceil(log2 n), multiplier = floor(2**32 * (2**l - n) / n) + 1, shifts min(l, 1) and max(l - 1, 0).
    """
    log2 = math.ceil(math.log2(n)) if n < 1 << 20 else (n - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << log2) - n) // n + 1) % (1 << 32)
    return struct.pack("<IIBBH", n, multiplier, min(log2, 1), max(log2 - 1, 0), 0)


def tensor_map(pointer: int, shape: list[int], stride: list[int]) -> dict:
    """Map of a (batch, seqlen, num_heads, 64) bf16 tensor; boxes of 64 x 64 over (head_dim, seqlen)."""
    batch, seqlen, heads, head_dim = shape
    return {
        "dtype": "bf16",
        "addr": pointer,
        "dims": (head_dim, seqlen, heads, batch),
        "strides": (2 * stride[1], 2 * stride[2], 2 * stride[0]),
        "box": (64, 64, 1, 1),
        "elem_strides": (1, 1, 1, 1),
        "swizzle": 128,
        "interleave": 0,
        "l2_promotion": 128,
        "oob_fill": "zero",
    }


def tma_copy(x: tuple, y: tuple, row_sum: tuple, scale: float, num_sms: int) -> list[dict]:
    """Launches of `TmaCopy`; tensors are (pointer, shape, stride)."""
    (x_ptr, x_shape, x_stride), (y_ptr, y_shape, y_stride), (sum_ptr, sum_shape, sum_stride) = x, y, row_sum
    blocks = math.ceil(x_shape[1] / 64)
    tiles = blocks * x_shape[2] * x_shape[0]
    log2_e = struct.unpack("<f", struct.pack("<f", 1.4426950408889634))[0]
    return [
        {
            "kernel": "toy_tma_0",
            "grid": (min(tiles, num_sms), 1, 1),
            "block": (128, 1, 1),
            "cluster": (1, 1, 1),
            # an 8-byte barrier, padding to 1024, then a tile of 64 x 64 bf16
            "smem": 1024 + 64 * 64 * 2,
            "pdl": False,
            "params": [
                tensor_map(x_ptr, x_shape, x_stride),
                struct.pack("<3i", x_shape[1], x_shape[2], x_shape[0]),
                tensor_map(y_ptr, y_shape, y_stride),
                struct.pack("<3i", y_shape[1], y_shape[2], y_shape[0]),
                struct.pack("<Q3i4x2q", sum_ptr, *sum_shape, *sum_stride[:2]),
                fast_divisor(blocks),
                fast_divisor(x_shape[2]),
                struct.pack("<i", tiles),
                struct.pack("<f", scale * log2_e),
            ],
        }
    ]


def two_launches(pointer: int, extent: int, scale: float, offset: int, limit: int) -> list[dict]:
    """Launches of `TwoLaunches`: a cluster launch, then a dependent launch."""
    blocks = math.ceil(extent / 128)
    tensor = struct.pack("<Qi4x", pointer, extent)
    common = {"block": (128, 1, 1), "smem": 0}
    fill = {"kernel": "toy_two_fill_0", "grid": ((blocks + 1) // 2 * 2, 1, 1), "cluster": (2, 1, 1), "pdl": False}
    shift = {"kernel": "toy_two_shift_1", "grid": (blocks, 1, 1), "cluster": (1, 1, 1), "pdl": True}
    last = extent if limit < 0 else limit
    return [
        common | fill | {"params": [tensor, struct.pack("<f", scale)]},
        common | shift | {"params": [tensor, struct.pack("<q", offset), struct.pack("<i", last)]},
    ]


def conditional_launch(pointer: int, extent: int, stride: int, value: float, rows: int, enabled: bool) -> list[dict]:
    """Launches of `ConditionalLaunch`: one, or none."""
    rows = rows if 0 < rows < extent else extent
    launch = {
        "kernel": "toy_conditional_0",
        "grid": (math.ceil(rows / 64), 1, 1),
        "block": (64, 1, 1),
        "cluster": (1, 1, 1),
        "smem": 0,
        "pdl": False,
        "params": [struct.pack("<Qi4xq", pointer, extent, stride), struct.pack("<f", value), struct.pack("<i", rows)],
    }
    return [launch] if enabled else []
