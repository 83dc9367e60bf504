"""Problems for which a GPU's outputs of our forward kernels are recorded, and the recording's place and form."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fa4build.simulate.units.float_formats import f32_to_bf16_rn, f32_to_f16_rn

RECORDING = Path(__file__).parents[1] / "golden" / "h200_forward.npz"
VARIANTS = (
    "fwd-sm90a-bf16-hd128-causal",
    "fwd-sm90a-bf16-hd128-full",
    "fwd-sm90a-bf16-hd64-local",
    "fwd-sm90a-fp16-hd64-causal",
    "fwd-sm90a-bf16-hd256-causal",
)
UNBOUNDED = 2**30
UNWRITTEN = {2: 0xCDCD, 4: 0xCDCDCDCD}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCase:
    """One problem with batch 1. query_scale multiplies q: large logits. window: used by local kernels."""

    name: str
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int = 1
    num_heads_kv: int = 1
    query_scale: float = 1.0
    window: tuple[int, int] = (40, 10)


CASES = (
    ForwardCase(name="ragged", seqlen_q=137, seqlen_k=200, num_heads_q=2),
    ForwardCase(name="large-logits", seqlen_q=70, seqlen_k=260, query_scale=6.0),
    ForwardCase(name="masked-rows", seqlen_q=150, seqlen_k=60, window=(-3, 20)),
)


def draw(seed: int, shape: tuple[int, ...], scale: float, dtype: str) -> np.ndarray:
    """About normal numbers as 16-bit patterns: each the sum of four random bytes, centred.

    Uses the generator's raw words, whose sequence numpy guarantees, and exact arithmetic: the same on every machine.
    """
    count = int(np.prod(shape))
    raw = np.random.PCG64(seed).random_raw((count + 1) // 2).view(np.uint8).reshape(-1, 4)[:count]
    values = (raw.sum(axis=1, dtype=np.int32) - 510).astype(np.float32) * np.float32(scale / 128)
    encode = f32_to_bf16_rn if dtype == "bf16" else f32_to_f16_rn
    return encode(values.view(np.uint32)).reshape(shape)


def arrays_of(case: ForwardCase, head_dim: int, dtype: str) -> dict[str, np.ndarray]:
    """q, k, v as bit patterns, out and lse as never written; layouts of docs/formats.md section 1."""
    queries = (1, case.seqlen_q, case.num_heads_q, head_dim)
    keys = (1, case.seqlen_k, case.num_heads_kv, head_dim)
    return {
        "q": draw(1, queries, case.query_scale, dtype),
        "k": draw(2, keys, 1.0, dtype),
        "v": draw(3, keys, 1.0, dtype),
        "out": np.full(queries, UNWRITTEN[2], dtype=np.uint16),
        "lse": np.full((1, case.num_heads_q, case.seqlen_q), UNWRITTEN[4], dtype=np.uint32).view(np.float32),
    }


def scalars_of(case: ForwardCase, head_dim: int, mask: str, num_sms: int) -> dict[str, float | int]:
    """Scalar arguments: the usual scale; the case's window for local kernels, else what the mask says."""
    left, right = {"causal": (UNBOUNDED, 0), "full": (UNBOUNDED, UNBOUNDED)}.get(mask, case.window)
    return {
        "softmax_scale": float(np.float32(head_dim**-0.5)),
        "window_left": left,
        "window_right": right,
        "num_sms": num_sms,
    }


def packed_text(text: str) -> np.ndarray:
    """Text as compressed bytes, for an .npz file."""
    return np.frombuffer(lzma.compress(text.encode()), dtype=np.uint8)


def unpacked_text(data: np.ndarray) -> str:
    """The text that `packed_text` packed."""
    return lzma.decompress(data.tobytes()).decode()
