"""Problems of packed, paged and split attention, soft cap, sink and fp8, and their inputs on a device.

Exact in the kernel's type, with NaN wherever no result may depend on.
"""

import math
from dataclasses import dataclass, replace

from prove_forward import UNBOUNDED

FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Case:
    """Sequences by length; used lengths where rows behind them exist. `splits`, `page_size`: for kernels with them."""

    name: str
    lengths_q: tuple
    lengths_k: tuple
    used_q: tuple | None = None
    used_k: tuple | None = None
    heads_q: int = 2
    heads_kv: int = 2
    window: tuple | None = None
    fill: str = "normal"
    page_size: int = 64
    splits: int = 3
    softcap: float = 15.0
    sink: float | None = None


def sparse(rows, batch):
    """Lengths of `batch` sequences, 0 where not named."""
    return tuple(rows.get(b, 0) for b in range(batch))


PACKED = (
    Case("single", (1,), (1,)),
    Case("unequal", (113, 7, 300, 1), (113, 7, 300, 1)),
    Case("unequal-keys", (5, 130, 1), (200, 17, 129), heads_q=4, heads_kv=1),
    Case("empty-ones", (0, 3, 0, 0, 20, 0), (5, 0, 0, 9, 40, 7)),
    Case(
        "very-many-empty",
        sparse({0: 1, 31: 2, 32: 130, 255: 3, 256: 2, 1029: 1}, 1030),
        sparse({0: 3, 31: 40, 33: 129, 255: 1, 1029: 2}, 1030),
    ),
    Case("used-lengths", (60, 140, 9, 20), (150, 70, 10, 30), (33, 129, 0, 20), (129, 70, 10, 0)),
    Case("group-of-five", (33, 17), (65, 90), heads_q=5, heads_kv=1),
    Case("large", (4096, 1000, 2048), (4096, 3000, 129), heads_q=4, heads_kv=2),
    Case("many", tuple(range(1, 200, 3)), tuple(range(400, 1, -6))[:67], heads_q=8, heads_kv=1),
    Case("rising", (3, 40), (900, 400), fill="rising"),
    Case("large-logits", (64, 3), (300, 500), fill="large_logits"),
    *(
        Case(f"decode-{rows}", (rows,) * 3, (16384, 9000, 1), heads_q=8, heads_kv=1, used_k=(16384, 8999, 1))
        for rows in (1, 2, 5, 8)
    ),
)
DENSE = (
    Case("single", (1,), (1,)),
    Case("odd", (17,), (129,)),
    Case("batch", (127,) * 3, (130,) * 3, heads_q=4, heads_kv=1),
    Case("group-of-five", (33,), (65,), heads_q=5, heads_kv=1),
    Case("more-queries", (1000,), (129,)),
    Case("large", (4096,), (4096,), heads_q=2, heads_kv=1),
    Case("large-logits", (64,), (300,), fill="large_logits"),
    Case("rising", (64,), (1000,), fill="rising"),
)
WINDOWS = ((64, 0), (20, UNBOUNDED), (UNBOUNDED, 7), (3, 3), (0, 0), (-10, 40))


def cases_for(axes, op):
    """The cases of a forward or backward kernel."""
    cases = list(DENSE if axes["layout"] == "dense" else PACKED)
    if op == "bwd":
        cases = [case for case in cases if not case.name.startswith("decode")]
    if axes["layout"] == "paged":
        sizes = {"unequal": 16, "unequal-keys": 128, "decode-2": 16, "decode-5": 128}
        cases = [replace(case, used_k=case.used_k or case.lengths_k) for case in cases]
        cases = [replace(case, page_size=sizes.get(case.name, 64)) for case in cases]
    if axes["mask"] == "local":
        shapes = [case for case in cases if case.name in ("unequal", "odd")]
        cases = [replace(case, window=WINDOWS[i % len(WINDOWS)]) for i, case in enumerate(cases)]
        cases += [replace(case, name=f"{case.name}-{window}", window=window) for window in WINDOWS for case in shapes]
    small = next(case for case in cases if case.name in ("unequal", "odd"))
    if axes.get("sink"):
        cases += [replace(small, name=f"sink{sink:g}", sink=sink) for sink in (0.0, -1e4, 100.0)]
    if axes.get("softcap"):
        cases += [replace(small, name="small-cap", softcap=0.5, fill="large_logits")]
    if axes.get("split"):
        more = [case for case in cases if case.name in ("unequal-keys", "decode-1", "empty-ones")]
        cases += [replace(case, name=f"{case.name}-{n}", splits=n) for case in more for n in (1, 2, 5, 33)]
    if axes["dtype"] in FP8:
        cases += [
            Case("tail-mass", (3,), (1100,), fill="tail_mass", used_k=(1100,) if axes["layout"] == "paged" else None)
        ]
    return cases


def torch_dtype(torch, dtype):
    """The type of q, k, v."""
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[dtype]


class Drawn:
    """Sequences of a case, exact in the kernel's type, and what says where they lie."""

    def __init__(self, torch, case, axes, generator):
        self.torch, self.case, self.axes, self.generator = torch, case, axes, generator
        self.device = generator.device
        self.dtype = torch_dtype(torch, axes["dtype"])
        self.rows_q, self.rows_k = case.used_q or case.lengths_q, case.used_k or case.lengths_k
        self.sequences = [self._sequence(n, m) for n, m in zip(self.rows_q, self.rows_k, strict=True)]
        self.window = {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0)}.get(axes["mask"], case.window)
        self.scale = axes["head_dim"] ** -0.5
        self.softcap = case.softcap if axes.get("softcap") else 0.0
        self.sink = None
        if axes.get("sink"):
            self.sink = self.normal(case.heads_q) if case.sink is None else self.full(case.heads_q, case.sink)
        self.descales = None
        if axes["dtype"] in FP8:
            shape = (3, len(self.rows_q), case.heads_kv)
            factors = torch.rand(shape, generator=generator, device=self.device) + 0.5
            self.descales = torch.ones_like(factors) if case.fill == "tail_mass" else factors

    def normal(self, *shape):
        """Standard normal numbers."""
        return self.torch.randn(shape, device=self.device, generator=self.generator)

    def full(self, count, number):
        """A vector of one number."""
        return self.torch.full((count,), float(number), device=self.device)

    def _sequence(self, rows, keys):
        case, head_dim = self.case, self.axes["head_dim"]
        q, k = self.normal(rows, case.heads_q, head_dim), self.normal(keys, case.heads_kv, head_dim)
        v = self.normal(keys, case.heads_kv, self.axes["head_dim_v"])
        if case.fill == "large_logits":
            q = q * 8
        elif case.fill == "rising":
            q = q * 0.1 + 1
            k = k * 0.1 + (4.0 * self.torch.arange(keys, device=self.device) / 32 / head_dim**0.5)[:, None, None]
        elif case.fill == "tail_mass":
            q, k, v = self.torch.ones_like(q), self.torch.zeros_like(k), self.torch.ones_like(v)
            k[0], v[0] = {64: 1.25}.get(head_dim, 0.875), 0
        return tuple(x.to(self.dtype) for x in (q, k, v))

    def ints(self, numbers):
        """A list for the kernels."""
        return self.torch.tensor(list(numbers), dtype=self.torch.int32, device=self.device)

    def starts(self, lengths):
        """cu_seqlens."""
        return self.ints([0, *(sum(lengths[: b + 1]) for b in range(len(lengths)))])

    def packed(self, parts, lengths, tail=5):
        """One behind the other, with NaN in every other row."""
        whole = self.torch.full((sum(lengths) + tail, *parts[0].shape[1:]), math.nan, device=self.device).to(
            parts[0].dtype
        )
        start = 0
        for part, length in zip(parts, lengths, strict=True):
            whole[start : start + len(part)] = part
            start += length
        return whole

    def places(self):
        """Where the rows of each sequence lie in packed queries."""
        start = 0
        for rows, length in zip(self.rows_q, self.case.lengths_q, strict=True):
            yield slice(start, start + rows)
            start += length

    def arguments(self):
        """Inputs by the names of the signature."""
        case, layout = self.case, self.axes["layout"]
        q, k, v = ([sequence[i] for sequence in self.sequences] for i in range(3))
        named = {"softmax_scale": self.scale, "window_left": self.window[0], "window_right": self.window[1]}
        named |= {"softcap": self.softcap, "sink": self.sink, "scale": self.scale}
        if self.descales is not None:
            named |= dict(zip(("q_descale", "k_descale", "v_descale"), self.descales, strict=True))
        if layout == "dense":
            return named | {"q": self.torch.stack(q), "k": self.torch.stack(k), "v": self.torch.stack(v)}
        named |= {"q": self.packed(q, case.lengths_q), "cu_seqlens_q": self.starts(case.lengths_q)}
        named |= {"cu_seqlens": named["cu_seqlens_q"]}
        named["seqused_q"] = named["seqused"] = self.ints(case.used_q or ())
        named["seqused_k"] = self.ints(case.used_k or ())
        if layout == "varlen":
            named |= {"k": self.packed(k, case.lengths_k), "v": self.packed(v, case.lengths_k)}
            return named | {"cu_seqlens_k": self.starts(case.lengths_k)}
        return named | self._pages(k, v)

    def _pages(self, k, v):
        size, counts = self.case.page_size, [-(-n // self.case.page_size) for n in self.rows_k]
        order = self.torch.randperm(sum(counts) + 3, generator=self.torch.Generator().manual_seed(7)).tolist()
        table = [[2**31 - 1, -1, 12345678][b % 3 : b % 3 + 1] * (max(counts) + 2) for b in range(len(counts))]
        pages = {}
        for name, parts in (("k", k), ("v", v)):
            shape = (len(order), size, *parts[0].shape[1:])
            pages[name] = self.torch.full(shape, math.nan, device=self.device).to(self.dtype)
        for b, count in enumerate(counts):
            for n in range(count):
                table[b][n] = order.pop()
                for name, parts in (("k", k), ("v", v)):
                    piece = parts[b][n * size : (n + 1) * size]
                    pages[name][table[b][n], : len(piece)] = piece
        return pages | {"page_table": self.torch.tensor(table, dtype=self.torch.int32, device=self.device)}
