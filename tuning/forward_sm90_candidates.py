"""Tuning candidates that forward_sm90.py compiles, checks and times. Rows that won go to
fa4build/matrix/tuning.py."""

from forward_sm90 import Candidate, tuned


def _row(name: str, **keywords) -> Candidate:
    return Candidate(name=name, **keywords)


PERSISTENT = {"persistent": True, "separate_output": True}
LONGEST = {"order": "longest_first"}
NO_TURNS = {"ping_pong": False}


def _full(head_dim: int) -> list[dict]:
    """Tiles worth trying for a head_dim with no mask; the first is the row of fa4build/matrix/tuning.py."""
    return {
        64: [tuned(3, 128, 3, **PERSISTENT), tuned(3, 128, 2, **PERSISTENT)],
        96: [tuned(3, 112, **PERSISTENT), tuned(3, 96, **PERSISTENT), tuned(3, 112, **PERSISTENT, **NO_TURNS)],
        128: [
            tuned(2, 128, **PERSISTENT),
            tuned(2, 128, **PERSISTENT, **NO_TURNS),
            tuned(2, 144, **PERSISTENT),
            tuned(2, 128, rescale_threshold=0.0, **PERSISTENT),
        ],
        192: [
            tuned(2, 112, **PERSISTENT, **NO_TURNS),
            tuned(2, 128, persistent=True, **NO_TURNS),
            tuned(2, 128, persistent=True),
        ],
        256: [tuned(2, 80, persistent=True), tuned(2, 80, persistent=True, **NO_TURNS), tuned(2, 80)],
    }[head_dim]


def _masked(head_dim: int) -> list[dict]:
    """Tiles worth trying with a causal mask, where tiles differ in length; the first is the row of tuning.py."""
    return {
        64: [tuned(3, 128, 3, **LONGEST, **PERSISTENT), tuned(3, 128, **LONGEST)],
        96: [tuned(3, 96, **LONGEST), tuned(3, 96, **LONGEST, **PERSISTENT), tuned(2, 128, **LONGEST, **PERSISTENT)],
        128: [
            tuned(2, 128, **LONGEST, **PERSISTENT),
            tuned(2, 128, **LONGEST),
            tuned(2, 128, **LONGEST, **PERSISTENT, **NO_TURNS),
        ],
        192: [tuned(2, 128, **LONGEST), tuned(2, 112, **LONGEST, **PERSISTENT)],
        256: [tuned(2, 64, **LONGEST, **NO_TURNS), tuned(2, 80, **LONGEST), tuned(2, 64, **LONGEST)],
    }[head_dim]


def _local(head_dim: int) -> list[dict]:
    """Tiles worth trying with a sliding window of a few blocks; the first is the row of tuning.py."""
    return {
        64: [tuned(3, 96), tuned(3, 128), tuned(3, 128, **PERSISTENT)],
        96: [tuned(2, 128, **PERSISTENT), tuned(2, 128), tuned(3, 96, **PERSISTENT)],
        128: [tuned(2, 128, **PERSISTENT), tuned(2, 128), tuned(2, 128, **LONGEST, **PERSISTENT)],
        192: [tuned(2, 128), tuned(2, 128, persistent=True), tuned(2, 112, **PERSISTENT)],
        256: [tuned(2, 64, **NO_TURNS), tuned(2, 64, **LONGEST, persistent=True), tuned(2, 80)],
    }[head_dim]


def _label(tuning: dict) -> str:
    parts = [f"m{tuning['tile_m']}n{tuning['tile_n']}s{tuning['kv_stages']}"]
    parts += [name for name in ("persistent", "separate_output") if tuning.get(name)]
    parts += ["noturns"] if not tuning.get("ping_pong", True) else []
    parts += [f"thr{tuning['rescale_threshold']:g}"] if "rescale_threshold" in tuning else []
    parts += [tuning["order"]] if "order" in tuning else []
    return " ".join(parts)


def _all() -> list[Candidate]:
    rows = []
    for head_dim in (128, 64, 256, 96, 192):
        shape = {"head_dim": head_dim, "head_dim_v": 128 if head_dim == 192 else 0}
        for mask, tunings in (("full", _full), ("causal", _masked), ("local", _local)):
            for i, tuning in enumerate(tunings(head_dim)):
                name = f"bf16 {head_dim} {mask} {_label(tuning)}"
                rows.append(_row(name, **shape, mask=mask, tuning=tuning, thorough=i == 0))
    for head_dim, mask, tunings in ((128, "full", _full), (128, "causal", _masked), (64, "local", _local)):
        tuning = tunings(head_dim)[0]
        rows.append(
            _row(f"fp16 {head_dim} {mask}", dtype="fp16", head_dim=head_dim, mask=mask, tuning=tuning, thorough=True)
        )
    return rows


CANDIDATES = _all()
