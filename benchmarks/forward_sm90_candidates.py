"""Tuning candidates that forward_sm90_dev.py compiles, checks and times. Rows that won go to fa4build/tuning.py."""

from forward_sm90_dev import Candidate, tuned


def _row(name: str, **keywords) -> Candidate:
    return Candidate(name=name, **keywords)


def _full(head_dim: int) -> list[dict]:
    """Tiles worth trying for a head_dim with no mask."""
    persistent = {"persistent": True, "separate_output": True}
    off = {"ping_pong": False}
    return {
        64: [
            tuned(3, 128, 3, **persistent),
            tuned(3, 128, 2, **persistent),
            tuned(3, 128, 3, **persistent, **off),
            tuned(3, 96, 3, **persistent),
            tuned(3, 144, 2, **persistent),
            tuned(3, 128),
        ],
        96: [tuned(3, 96, 2, **persistent), tuned(3, 112), tuned(3, 96), tuned(2, 128, **persistent), tuned(2, 160)],
        128: [
            tuned(2, 128, **persistent),
            tuned(2, 128, **persistent, **off),
            tuned(2, 128),
            tuned(2, 160, **persistent),
            tuned(2, 160, **persistent, **off),
            tuned(2, 176, persistent=True),
            tuned(2, 176),
            tuned(2, 128, rescale_threshold=0.0, **persistent),
        ],
        192: [
            tuned(2, 128, **off),
            tuned(2, 128),
            tuned(2, 112, **persistent),
            tuned(2, 112, **persistent, **off),
            tuned(2, 128, persistent=True),
        ],
        256: [
            tuned(2, 80),
            tuned(2, 80, **off),
            tuned(2, 80, persistent=True),
            tuned(2, 64, **off),
            tuned(2, 64, persistent=True, **off),
        ],
    }[head_dim]


def _masked(head_dim: int) -> list[dict]:
    """Tiles worth trying for a head_dim with a causal mask, where tiles differ in length."""
    lpt, off = {"order": "longest_first"}, {"ping_pong": False}
    two = {"tiles_per_cta": 2, **lpt}
    return {
        64: [
            tuned(3, 128, **lpt),
            tuned(3, 128, 3, **lpt),
            tuned(3, 128, 3, separate_output=True, **two),
            tuned(3, 128, 3, separate_output=True, **two, **off),
            tuned(3, 96, 3, **lpt),
        ],
        96: [tuned(3, 96, **lpt), tuned(2, 128, **lpt), tuned(2, 160, **lpt), tuned(3, 96, **two)],
        128: [
            tuned(2, 128, **lpt),
            tuned(2, 128, **lpt, **off),
            tuned(2, 128),
            tuned(2, 128, separate_output=True, **two),
            tuned(2, 128, separate_output=True, **lpt, tiles_per_cta=3),
            tuned(2, 112, separate_output=True, **two),
            tuned(2, 160, separate_output=True, **two),
            tuned(2, 176, **lpt),
            tuned(2, 96, 3, **lpt),
        ],
        192: [tuned(2, 128, **lpt), tuned(2, 112, **lpt), tuned(2, 128, **two), tuned(2, 128, **lpt, **off)],
        256: [tuned(2, 64, **lpt, **off), tuned(2, 80, **lpt), tuned(2, 80, **two), tuned(2, 64, **two, **off)],
    }[head_dim]


def _local(head_dim: int) -> list[dict]:
    """Tiles worth trying with a sliding window of a few blocks."""
    persistent = {"persistent": True, "separate_output": True}
    return {
        64: [tuned(3, 128), tuned(3, 128, 3, **persistent), tuned(3, 64, 3, **persistent)],
        96: [tuned(2, 128), tuned(3, 96), tuned(2, 128, **persistent)],
        128: [
            tuned(2, 128),
            tuned(2, 128, **persistent),
            tuned(2, 96, 3, **persistent),
            tuned(2, 128, ping_pong=False),
        ],
        192: [tuned(2, 128), tuned(2, 96), tuned(2, 96, **persistent)],
        256: [tuned(2, 64), tuned(2, 64, ping_pong=False), tuned(2, 64, persistent=True)],
    }[head_dim]


def _label(tuning: dict) -> str:
    parts = [f"m{tuning['tile_m']}n{tuning['tile_n']}s{tuning['kv_stages']}"]
    parts += [name for name in ("persistent", "separate_output") if tuning.get(name)]
    parts += [f"tiles{tuning['tiles_per_cta']}"] if "tiles_per_cta" in tuning else []
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
    rows.append(_row("fp16 128 full", dtype="fp16", tuning=tuned(2, 128), thorough=True))
    rows.append(_row("fp16 128 causal", dtype="fp16", mask="causal", tuning=tuned(2, 128), thorough=True))
    return rows


CANDIDATES = _all()
