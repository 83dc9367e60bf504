"""Tensor maps: from the eight words that host code packs inline to the arguments of cuTensorMapEncodeTiled, and back.

The layout of the words is in the table below (bit positions from 0; word 0 is the address). Two bits are left out: word
1 bit 1, which CuTe sets and the driver does not, and word 1 bit 21, which CuTe derives from the tensor's size. Words 8
to 15 are the driver's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.builder import NodeTable
from fa4build.plan.values import INT_BITS, TensorMapParam, TensorMapTemplate

WORDS = 8
IGNORED_BITS = (0, (1 << 1) | (1 << 21), 0, 0, 0, 0, 0, 0)
_MASK64 = (1 << 64) - 1
_ADDRESS_MASK = 0x01FF_FFFF_FFFF_FFF0  # bits 4 to 56

_DTYPES = {0: "u8", 1: "u16", 2: "u32", 3: "i32", 4: "u64", 5: "i64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}
_DTYPE_CODES = {name: code for code, name in _DTYPES.items()} | {"tf32": 7}
_TF32_BIT = 16
_SWIZZLES = (0, 32, 64, 128)
_INTERLEAVES = (0, 16, 32)
_L2_PROMOTIONS = (0, 64, 128, 256)

# (word, first bit) of the low 32 bits of extent d, and of the low 32 bits of stride d (in units of 16 bytes), d from 1
_EXTENT_AT = ((4, 0), (4, 32), (5, 0), (5, 32), (6, 0))
_STRIDE_AT = {1: (1, 32), 2: (2, 0), 3: (2, 32), 4: (3, 0)}
_STRIDE_HIGH_AT = {1: (3, 32), 2: (3, 36), 3: (3, 40), 4: (3, 44)}  # bits 36 to 39 of the stride


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """((node >> right) & mask) << left, one summand of a word."""

    node: int
    right: int
    mask: int
    left: int

    def covers(self, low: int, width: int) -> bool:
        """True if some bit of the term may fall into the field."""
        span = (self.mask << self.left) & _MASK64
        return bool(span & (((1 << width) - 1) << low))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """A word as constant bits plus terms."""

    constant: int
    terms: tuple[_Term, ...]

    def bits(self, low: int, width: int) -> int:
        """A field that must be constant."""
        if any(term.covers(low, width) for term in self.terms):
            raise LaunchPlanError(f"a tensor map's bits {low} to {low + width - 1} depend on the caller's data")
        return (self.constant >> low) & ((1 << width) - 1)


def _word(table: NodeTable, node: int) -> _Word:
    constant, terms = 0, []
    stack = [(node, 0)]
    while stack:
        node, left = stack.pop()
        op = table.nodes[node]
        value = table.constant(node)
        if isinstance(value, int):
            constant |= (value & _MASK64) << left & _MASK64
        elif op[0] == "or":
            stack += [(op[2], left), (op[3], left)]
        elif op[0] == "shl" and (amount := table.constant(op[3])) is not None:
            stack.append((op[2], left + int(amount)))
        else:
            terms.append(_term(table, node, left))
    return _Word(constant=constant, terms=tuple(terms))


def _term(table: NodeTable, node: int, left: int) -> _Term:
    """Peel masks and right shifts off a summand."""
    right, mask = 0, _MASK64
    while True:
        op = table.nodes[node]
        constant = table.constant(op[3]) if len(op) == 4 else None
        if op[0] == "and" and isinstance(constant, int):
            mask &= (constant & _MASK64) >> right
            node = op[2]
        elif op[0] == "lshr" and isinstance(constant, int) and 0 <= constant < 64:
            mask &= _MASK64 >> constant
            right, node = right + constant, op[2]
        elif op[0] == "udiv" and isinstance(constant, int) and constant > 0 and constant & (constant - 1) == 0:
            mask &= _MASK64 >> (constant.bit_length() - 1)
            right, node = right + constant.bit_length() - 1, op[2]
        elif op[0] == "zext" and right == 0:
            mask &= (1 << INT_BITS[table.type_of(op[2])]) - 1
            return _Term(node=node, right=right, mask=mask, left=left)
        else:
            return _Term(node=node, right=right, mask=mask, left=left)


def recover_map(table: NodeTable, words: Sequence[int]) -> TensorMapTemplate:
    """The structured form of eight packed words (nodes of type i64).

    Raises: LaunchPlanError when a word is not packed as known; callers also compare `pack_map` of the result with the
    words.
    """
    parts = [_word(table, node) for node in words]
    rank = parts[1].bits(4, 3) + 1
    if rank > 5:
        raise LaunchPlanError(f"a tensor map has {rank} dimensions; allowed: 1 to 5")
    return TensorMapTemplate(
        dtype=_dtype(parts[1]),
        addr=_address(table, parts[0]),
        dims=tuple(_extent(table, parts, d) for d in range(rank)),
        strides=tuple(_stride(table, parts, d) for d in range(1, rank)),
        box=tuple([parts[6].bits(56, 8) + 1, *(parts[7].bits(8 * d, 8) + 1 for d in range(4))][:rank]),
        elem_strides=tuple(parts[6].bits(32 + 3 * d, 3) + 1 for d in range(rank)),
        swizzle=_SWIZZLES[parts[1].bits(13, 2)],
        interleave=_choice(_INTERLEAVES, parts[1].bits(11, 2), "interleave"),
        l2_promotion=_L2_PROMOTIONS[parts[1].bits(17, 2)],
        oob_fill="nan" if parts[1].bits(15, 1) else "zero",
    )


def _choice(allowed: Sequence[int], index: int, name: str) -> int:
    if index >= len(allowed):
        raise LaunchPlanError(f"a tensor map has {name} code {index}; known: 0 to {len(allowed) - 1}")
    return allowed[index]


def _dtype(word: _Word) -> str:
    code, is_tf32 = word.bits(7, 4), word.bits(_TF32_BIT, 1)
    if code not in _DTYPES or (is_tf32 and code != 7):
        raise LaunchPlanError(f"a tensor map has data type code {code}; known: {sorted(_DTYPES)}")
    return "tf32" if is_tf32 else _DTYPES[code]


def _address(table: NodeTable, word: _Word) -> int:
    if not word.terms:
        return table.const(word.constant, "i64")
    term = word.terms[0]
    kept = (term.mask << term.left) & _MASK64
    if len(word.terms) > 1 or word.constant or term.right != term.left or kept & _ADDRESS_MASK != _ADDRESS_MASK:
        raise LaunchPlanError("a tensor map's address is not packed as known")
    return term.node


def _field(word: _Word, low: int, width: int, right: int) -> _Term | int:
    """What fills a field: the term whose bit `right` lands on bit `low`, or a constant."""
    covering = [term for term in word.terms if term.covers(low, width)]
    if not covering:
        return word.bits(low, width)
    term = covering[0]
    needed = (1 << width) - 1
    is_placed = term.left == low and term.right == right
    if len(covering) > 1 or not is_placed or word.constant >> low & needed or term.mask & needed != needed:
        raise LaunchPlanError(f"a tensor map's bits {low} to {low + width - 1} are not packed as known")
    return term


def _extent(table: NodeTable, parts: Sequence[_Word], d: int) -> int:
    word, low = _EXTENT_AT[d]
    found = _field(parts[word], low, 32, 0)
    if isinstance(found, int):
        return table.const(found + 1, "i64")
    return table.op("add", "i64", found.node, table.const(1, "i64"))


def _stride(table: NodeTable, parts: Sequence[_Word], d: int) -> int:
    (word, low), (high_word, high_low) = _STRIDE_AT[d], _STRIDE_HIGH_AT[d]
    found = _field(parts[word], low, 32, 4)
    high = _field(parts[high_word], high_low, 4, 36)
    if isinstance(found, int) and isinstance(high, int):
        return table.const((found << 4) | (high << 36), "i64")
    if isinstance(found, _Term) and (high == 0 or (isinstance(high, _Term) and high.node == found.node)):
        return found.node
    raise LaunchPlanError(f"a tensor map's stride {d} is not packed as known")


def pack_map(param: TensorMapParam) -> tuple[int, ...]:
    """The eight words of a map, `IGNORED_BITS` zero."""
    words = [0] * WORDS
    words[0] = param.addr & _ADDRESS_MASK
    words[1] |= (len(param.dims) - 1) << 4 | _DTYPE_CODES[param.dtype] << 7 | (param.dtype == "tf32") << _TF32_BIT
    words[1] |= _INTERLEAVES.index(param.interleave) << 11 | _SWIZZLES.index(param.swizzle) << 13
    words[1] |= (param.oob_fill == "nan") << 15 | _L2_PROMOTIONS.index(param.l2_promotion) << 17
    for d, extent in enumerate(param.dims):
        word, low = _EXTENT_AT[d]
        words[word] |= ((extent - 1) & 0xFFFF_FFFF) << low
        words[6] |= (param.elem_strides[d] - 1) << (32 + 3 * d)
        words[6 if d == 0 else 7] |= (param.box[d] - 1) << (56 if d == 0 else 8 * (d - 1))
    for d, stride in enumerate(param.strides, start=1):
        (word, low), (high_word, high_low) = _STRIDE_AT[d], _STRIDE_HIGH_AT[d]
        words[word] |= (stride >> 4 & 0xFFFF_FFFF) << low
        words[high_word] |= (stride >> 36 & 0xF) << high_low
    return tuple(words)
