"""Verification of Ed25519 signatures in plain Python, for machines where nothing can be installed for it.

Only verification: everything it sees is public, so how long it takes tells nobody anything. Signing belongs to a
library that keeps keys out of timing (fa4build uses `cryptography`). Source: RFC 8032, sections 5.1 and 5.1.7.
"""

import hashlib

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_SQRT_MINUS_ONE = pow(2, (_P - 1) // 4, _P)

# A point of the curve in extended coordinates (X, Y, Z, T): x = X/Z, y = Y/Z, x * y = T/Z.
_Point = tuple[int, int, int, int]
_NEUTRAL: _Point = (0, 1, 1, 0)


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` (64 bytes) over `message` was made with the private key of `public_key` (32 bytes).

    Contract: False for everything malformed: other lengths, numbers that are not reduced, no point of the curve, and
        keys of small order, for which signatures can be made without a private key. Never raises for bytes.
    Cost: about 3 ms (CPython 3.11, one core).
    """
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    key = _decode(public_key)
    commitment, scalar = signature[:32], int.from_bytes(signature[32:], "little")
    if key is None or scalar >= _ORDER or _has_small_order(key):
        return False
    challenge = int.from_bytes(hashlib.sha512(commitment + public_key + message).digest(), "little") % _ORDER
    # The signer's equation is scalar * B = R + challenge * A, and R is compared in its encoded form.
    x, y, z, t = key
    return _encode(_sum_of_multiples(scalar, _BASE, challenge, (-x % _P, y, z, -t % _P))) == commitment


def _decode(data: bytes) -> _Point | None:
    """The point that 32 bytes encode, None if there is none or it has another encoding."""
    encoded = int.from_bytes(data, "little")
    sign, y = encoded >> 255, encoded & ((1 << 255) - 1)
    if y >= _P:
        return None
    x = _x_coordinate(y, sign)
    return None if x is None else (x, y, 1, x * y % _P)


def _x_coordinate(y: int, sign: int) -> int | None:
    """The x with this lowest bit for a y, None if the curve has no such point. Section 5.1.3."""
    numerator, denominator = (y * y - 1) % _P, (_D * y * y + 1) % _P
    x = numerator * pow(denominator, 3, _P) * pow(numerator * pow(denominator, 7, _P), (_P - 5) // 8, _P) % _P
    if denominator * x * x % _P == -numerator % _P:
        x = x * _SQRT_MINUS_ONE % _P
    if denominator * x * x % _P != numerator or (x == 0 and sign):
        return None
    return x if x & 1 == sign else _P - x


def _encode(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


def _add(a: _Point, b: _Point) -> _Point:
    """Section 5.1.4; complete, so it also doubles and takes the neutral element."""
    x1, y1, z1, t1 = a
    x2, y2, z2, t2 = b
    e, f = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    g, h = 2 * _D * t1 * t2 % _P, 2 * z1 * z2 % _P
    p, q, r, s = f - e, h - g, h + g, f + e
    return p * q % _P, r * s % _P, q * r % _P, p * s % _P


def _double(a: _Point) -> _Point:
    x, y, z, _ = a
    xx, yy = x * x % _P, y * y % _P
    h = xx + yy
    e, g = h - (x + y) * (x + y) % _P, xx - yy
    f = 2 * z * z + g
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _sum_of_multiples(m: int, a: _Point, n: int, b: _Point) -> _Point:
    """m * a + n * b with one chain of doublings, two bits of each number at a time."""
    multiples = [[_NEUTRAL, point, _double(point), _add(_double(point), point)] for point in (a, b)]
    table = [[_add(multiples[0][i], multiples[1][j]) for j in range(4)] for i in range(4)]
    total = _NEUTRAL
    for shift in range(256, -2, -2):
        total = _double(_double(total))
        i, j = m >> shift & 3, n >> shift & 3
        if i or j:
            total = _add(total, table[i][j])
    return total


def _has_small_order(point: _Point) -> bool:
    x, _, z, _ = eightfold = _double(_double(_double(point)))
    return x == 0 and (eightfold[1] - z) % _P == 0


def _base_point() -> _Point:
    y = 4 * pow(5, -1, _P) % _P
    x = _x_coordinate(y, 0)
    assert x is not None
    return x, y, 1, x * y % _P


_BASE = _base_point()
