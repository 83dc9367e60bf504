"""What benchmarks call the libraries, what people call them, and how they look: the same everywhere on the page."""

from dataclasses import dataclass

from fa4build.report.style import SERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """label: for people. color, style: of lines and bars. is_ours, is_plain: whether it can be compared with others."""

    label: str
    color: str
    style: str = "-"
    is_ours: bool = False
    is_plain: bool = True


_OURS, _UPSTREAM, _CUDNN, _FA2, _SDPA = SERIES[0], SERIES[1], SERIES[2], SERIES[4], SERIES[5]
_LOOKS = {
    "fa4_kernels": Look(label="ours", color=_OURS, is_ours=True),
    "ours": Look(label="ours", color=_OURS, is_ours=True),
    "fa4_kernels_packed": Look(label="ours, varlen", color=_OURS, style=":", is_ours=True, is_plain=False),
    "fa4_kernels_deterministic": Look(
        label="ours, deterministic", color=_OURS, style="--", is_ours=True, is_plain=False
    ),
    "flash_attn_4": Look(label="flash-attn-4", color=_UPSTREAM),
    "upstream": Look(label="flash-attn-4", color=_UPSTREAM),
    "flash_attn_4_deterministic": Look(
        label="flash-attn-4, deterministic", color=_UPSTREAM, style="--", is_plain=False
    ),
    "cudnn": Look(label="cuDNN", color=_CUDNN),
    "fa2": Look(label="FlashAttention-2", color=_FA2),
    "sdpa": Look(label="torch SDPA", color=_SDPA),
    "torch": Look(label="torch SDPA", color=_SDPA),
}
_SPARE = (SERIES[3], SERIES[6], SERIES[7])


def look_of(name: str, unknown: tuple[str, ...] = ()) -> Look:
    """How a series looks. One that is not known has its own name, and a colour by its place among the unknown ones."""
    if name in _LOOKS:
        return _LOOKS[name]
    number = unknown.index(name) if name in unknown else 0
    color = _SPARE[number % len(_SPARE)]
    return Look(label=name.replace("_", " "), color=color, style="-" if number < len(_SPARE) else "--", is_plain=False)


def is_known(name: str) -> bool:
    """Whether a series is of a library, and no other measurement."""
    return name in _LOOKS
