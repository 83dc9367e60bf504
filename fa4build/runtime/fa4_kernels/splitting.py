"""Into how many parts the keys of a call are split, so that few queries over many keys keep a whole device busy."""

from .abi import WINDOW_UNBOUNDED
from .errors import InputError

MAX_SPLITS = 256
_MAX_CHOSEN = 128
_KEYS_A_BLOCK = 128
_ROWS_A_BLOCK = 128
_FEW_BLOCKS = 4


def checked_splits(num_splits: int) -> int:
    """The number as asked for. Raises: InputError unless it is an int of at most MAX_SPLITS."""
    if not isinstance(num_splits, int) or isinstance(num_splits, bool) or num_splits > MAX_SPLITS:
        raise InputError(f"num_splits must be an int up to {MAX_SPLITS} (below 1: chosen here), it is {num_splits!r}")
    return num_splits


def query_blocks(*, batch: int, total_q: int, max_seqlen_q: int | None, num_heads_q: int, num_heads_kv: int) -> int:
    """Upper bound of the tiles of queries, with the query heads of a key head in one tile.

    Without `max_seqlen_q` every sequence is counted with a part of a tile more than its rows need.
    """
    if not num_heads_kv:
        return 0
    group = num_heads_q // num_heads_kv
    if max_seqlen_q is None:
        return num_heads_kv * (total_q * group // _ROWS_A_BLOCK + batch)
    return num_heads_kv * batch * -(-max_seqlen_q * group // _ROWS_A_BLOCK)


def visible_keys(window: tuple[int, int], max_seqlen_q: int | None, max_seqlen_k: int | None) -> int | None:
    """Upper bound of the keys that the queries of a sequence see together; None where it is not known."""
    if max_seqlen_q is None or max_seqlen_k is None or WINDOW_UNBOUNDED in window:
        return max_seqlen_k
    return min(max_seqlen_k, sum(window) + max_seqlen_q)


def chosen_splits(*, num_sms: int, num_query_blocks: int, max_seqlen_k: int | None) -> int:
    """As many parts as fill the device once, at most one a block of keys; 1 where keys are few or of unknown number.

    Source: fa4-kernels.md, section 1.3.
    """
    if max_seqlen_k is None:
        return 1
    key_blocks = -(-max_seqlen_k // _KEYS_A_BLOCK)
    if key_blocks <= _FEW_BLOCKS or num_query_blocks == 0:
        return 1
    return max(1, min(num_sms // num_query_blocks, _MAX_CHOSEN, key_blocks))
