"""Masks and windows: the one home of every rule about which keys a query sees.

Whatever a caller writes becomes one `Offsets`, the window as kernels take it; each dialect has one function here: ours
(`offsets_of`), FlashAttention-2's, 3's and torch's (`sides_without_negatives`), FlashAttention-4's
(`offsets_from_diagonal`), scaled_dot_product_attention's (`top_left`), transformers' (`sliding`). The launcher holds
our own rule a second time, for the calls that it answers alone (`window_mask` in _calls.h); tests compare the two.
"""

from typing import Any, NamedTuple

from .abi import WINDOW_UNBOUNDED
from .errors import InputError
from .scalars import checked_flag, whole

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


class Offsets(NamedTuple):
    """A window as kernels take it: how far a query sees to each side of its diagonal, both ends included.

    2^30 is a side without a bound, a negative number an offset like any other. Query i of a sequence has its diagonal
    at key i + seqlen_k - seqlen_q: masks end with the last key (bottom right). For callers within the package, and for
    front doors whose own meaning is this.
    """

    left: int
    right: int

    @property
    def mask(self) -> str:
        """Which kernel: full, causal or local."""
        if self.left != WINDOW_UNBOUNDED or self.right not in (0, WINDOW_UNBOUNDED):
            return "local"
        return "full" if self.right else "causal"

    @property
    def sees_nothing(self) -> bool:
        """Whether no query sees a key, whatever the lengths."""
        return self.left + self.right < 0

    @property
    def as_asked(self) -> tuple[bool, "Window | Offsets"]:
        """(causal, window_size) that ask for this: plain sides where no number is negative, for the launcher knows
        them; else the offsets."""
        if self.left < 0 or self.right < 0:
            return False, self
        if self.mask != "local":
            return self.mask == "causal", NO_WINDOW
        left, right = (None if side == WINDOW_UNBOUNDED else side for side in self)
        return False, (left, right)


def offsets(left: int, right: int) -> Offsets:
    """Checked, and clipped to 2^30 on both ends. Raises: InputError for what is no int."""
    return Offsets(*(max(-WINDOW_UNBOUNDED, min(_number(side), WINDOW_UNBOUNDED)) for side in (left, right)))


def _number(side: Any) -> Any:
    """An int, or None. Raises: InputError for anything else."""
    return side if side is None or type(side) is int else whole("window_size", side)


def offsets_of(causal: bool, window_size: Window | Offsets) -> Offsets:
    """The window of a call of ours.

    Contract: None and -1 are sides without a bound, as in FlashAttention-2 and 3 and in torch; two negative sides mean
        no window; causal sets the right side to 0; (None, 0) is causal; anything else with a side is local. Sides are
        clipped to 2^30. `Offsets` stand for themselves, and causal changes nothing about them.
    Raises: InputError for another negative number, which is unbounded to some and an offset to others, and for a side
        that is no int.
    """
    causal = checked_flag("causal", causal)
    if window_size is NO_WINDOW:
        return _CAUSAL if causal else _FULL
    if isinstance(window_size, Offsets):
        return offsets(*window_size)
    left, right = _sides(window_size)
    return Offsets(left, 0 if causal else right)


def _sides(window_size: Window) -> tuple[int, int]:
    try:
        left, right = window_size
        left, right = _number(left), _number(right)
    except (TypeError, ValueError) as error:
        raise InputError(f"window_size must be (left, right) of int or None, it is {window_size!r}") from error
    if left is not None and right is not None and left < 0 and right < 0:
        return WINDOW_UNBOUNDED, WINDOW_UNBOUNDED
    for side in (left, right):
        if side is not None and side < -1:
            raise InputError(
                f"window_size is ({left}, {right}); a side is a number of keys from 0 on, or -1 or None for no bound. "
                "A window that lies beside the diagonal is no window here"
            )
    return _bounded(left), _bounded(right)


def _bounded(side: int | None) -> int:
    return WINDOW_UNBOUNDED if side is None or side == -1 else min(side, WINDOW_UNBOUNDED)


_FULL = Offsets(WINDOW_UNBOUNDED, WINDOW_UNBOUNDED)
_CAUSAL = Offsets(WINDOW_UNBOUNDED, 0)


# --- how others write them --------------------------------------------------------------------------------------------


def sides_without_negatives(window_size: Window) -> Window:
    """FlashAttention-2 and 3, and torch's operators: every negative number is no bound."""
    try:
        left, right = window_size
    except (TypeError, ValueError) as error:
        raise InputError(f"window_size must be (left, right) of int or None, it is {window_size!r}") from error
    return _unless_negative(left), _unless_negative(right)


def _unless_negative(side: int | None) -> int | None:
    return None if side is None or _number(side) < 0 else side


def offsets_from_diagonal(causal: bool, left: int | None, right: int | None) -> Offsets:
    """FlashAttention-4: None is no bound and a number an offset, also a negative one; two sides whose sum is negative
    are no window; causal sets the right side to 0."""
    right = 0 if causal else right
    if left is not None and right is not None and _number(left) + _number(right) < 0:
        left, right = None, 0 if causal else None
    return offsets(*(WINDOW_UNBOUNDED if side is None else side for side in (left, right)))


def top_left(is_causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[bool, Window | Offsets]:
    """torch's scaled_dot_product_attention: query i sees keys 0 to i, whatever the lengths. As `as_asked`."""
    if not is_causal or seqlen_q == seqlen_k:
        return is_causal, NO_WINDOW
    return offsets(WINDOW_UNBOUNDED, seqlen_q - seqlen_k).as_asked


def sliding(width: int | None) -> Window:
    """transformers: the keys that a query sees to a side, itself included; causal takes the right side away."""
    return NO_WINDOW if width is None else (width - 1, width - 1)
