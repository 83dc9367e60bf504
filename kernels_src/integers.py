"""Integer operations that mean the same on the host and in device code.

A building block whose logic is integers (block ranges, tile orders) is written once with these and runs both as
ordinary Python, where its tests are, and traced into a kernel. Not for floating point.

Contract: both operands of one call are Python integers, or at least one is a device integer. `//` and `divmod` need no
wrapper: device `Int32 //` is floor division like Python's, and `divmod` with a `FastDivmodDivisorV2` needs a dividend
>= 0.
"""


def _is_host(*values) -> bool:
    return all(isinstance(value, int) for value in values)


def maximum(a, b):
    """The larger of two integers."""
    if _is_host(a, b):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def minimum(a, b):
    """The smaller of two integers."""
    if _is_host(a, b):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def select(condition, if_true, if_false):
    """`if_true` where the condition holds, else `if_false`; both are evaluated."""
    if _is_host(if_true, if_false) and isinstance(condition, (bool, int)):
        return if_true if condition else if_false
    from cutlass import Int32
    from cutlass.cutlass_dsl import select_

    return select_(condition, Int32(if_true), Int32(if_false))


def ceil_div(a, b):
    """ceil(a / b) for b > 0 and any sign of a (floor division underneath)."""
    return (a + b - 1) // b
