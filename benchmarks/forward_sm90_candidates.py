"""Tuning candidates that forward_sm90_dev.py compiles, checks and times. Rows that won go to fa4build/tuning.py."""

from forward_sm90_dev import Candidate, tuned


def _row(name: str, **keywords) -> Candidate:
    return Candidate(name=name, **keywords)


def _sizes(head_dim: int) -> list[dict]:
    """Tiles worth trying for a head_dim, most promising first."""
    persistent = {"persistent": True, "separate_output": True}
    return {
        64: [
            tuned(3, 128),
            tuned(3, 128, 3, **persistent),
            tuned(3, 128, ping_pong=False),
            tuned(2, 192, **persistent),
            tuned(2, 160, **persistent),
            tuned(2, 128, **persistent),
        ],
        96: [tuned(2, 128, **persistent), tuned(2, 160), tuned(3, 96)],
        128: [
            tuned(2, 128, **persistent),
            tuned(2, 128),
            tuned(2, 176),
            tuned(2, 176, persistent=True),
            tuned(2, 160, **persistent),
            tuned(2, 144, **persistent),
            tuned(2, 96, 3, **persistent),
            tuned(2, 128, ping_pong=False, **persistent),
            tuned(2, 128, rescale_threshold=0.0, **persistent),
        ],
        192: [tuned(2, 128, ping_pong=False), tuned(2, 128), tuned(2, 112, **persistent)],
        256: [
            tuned(2, 80, ping_pong=False),
            tuned(2, 80),
            tuned(2, 80, persistent=True),
            tuned(2, 64, ping_pong=False),
        ],
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
        head_dim_v = 128 if head_dim == 192 else 0
        shape = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        for i, tuning in enumerate(_sizes(head_dim)):
            label = _label(tuning)
            rows.append(_row(f"bf16 {head_dim} full {label}", **shape, tuning=tuning, thorough=i == 0))
            tuning = {**tuning, "order": "longest_first"}
            label = _label(tuning)
            rows.append(_row(f"bf16 {head_dim} causal {label}", **shape, mask="causal", tuning=tuning, thorough=i == 0))
        tuning = {**_sizes(head_dim)[1], "tile_n": 64 if head_dim == 256 else 128}
        rows.append(
            _row(f"bf16 {head_dim} local {_label(tuning)}", **shape, mask="local", tuning=tuning, thorough=True)
        )
    rows.append(_row("bf16 128 causal natural", mask="causal", tuning=tuned(2, 128)))
    rows.append(_row("fp16 128 full", dtype="fp16", tuning=tuned(2, 128), thorough=True))
    rows.append(_row("fp16 128 causal", dtype="fp16", mask="causal", tuning=tuned(2, 128), thorough=True))
    return rows


CANDIDATES = _all()
