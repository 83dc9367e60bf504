"""Which keys a query sees, from the definition: a dense boolean matrix. Source: docs/formats.md section 1."""

import numpy as np

UNBOUNDED = 2**30


def visible(seqlen_q: int, seqlen_k: int, mask: str, window_left: int = 0, window_right: int = 0) -> np.ndarray:
    """(seqlen_q, seqlen_k) booleans. "full" and "causal" ignore the window arguments."""
    left, right = {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0), "local": (window_left, window_right)}[mask]
    diagonal = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = np.arange(seqlen_k)[None]
    return (diagonal - left <= keys) & (keys <= diagonal + right)
