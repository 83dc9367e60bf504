"""What the attention layers of a model ask for, as values."""

from dataclasses import dataclass, field

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What one kind of layer hands to its attention function.

    Attributes:
        heads_q, heads_kv: of the whole model, before tensor parallelism.
        head_dim, head_dim_v: of q and k, and of v.
        mask: `full`, `causal` or `local`; `window` is then (left, right), keys that a query sees to each side beside
            its own, None for a side without a bound.
        softcap: scores become softcap * tanh(score / softcap); 0: none.
        sink: one learned logit a head in the sum of the softmax.
        has_cache: keys are kept from step to step, so that there is decoding.
        is_cross: keys come from another part of the model.
        unserved: why no kernel computes it, whatever its shape; empty where kernels of this kind exist.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: str
    window: Window | None = None
    softcap: float = 0.0
    sink: bool = False
    has_cache: bool = False
    is_cross: bool = False
    unserved: str = ""

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        window = f" window {_spelled(self.window)}" if self.window else ""
        extras = (f", softcap {self.softcap:g}" if self.softcap else "") + (", sink" if self.sink else "")
        cross = "cross, " if self.is_cross else ""
        return f"{cross}{self.heads_q}/{self.heads_kv} heads of {dims}, {self.mask}{window}{extras}"


def _spelled(window: Window) -> str:
    left, right = ("open" if side is None else str(side) for side in window)
    return f"{left} left" if right == "0" else f"({left}, {right})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tower of a model: its text decoder, a vision encoder, ...

    Attributes:
        name: the key of the part's own configuration, `text_config`; empty for a model of one part.
        model_type: as transformers names it.
        layers: the attention calls of each layer in order; none for a layer without attention, several for some.
        unknown: why the layers are not known; then there are `num_layers` of them all the same, 0 if not even that.
        max_tokens: positions that the configuration has, 0 where it names none; max_source_tokens: those of an encoder
            whose keys cross attention reads.
        notes: what holds for some calls only.
    """

    name: str
    model_type: str
    layers: tuple[tuple[Attention, ...], ...] = ()
    unknown: str = ""
    num_layers: int = 0
    max_tokens: int = 0
    max_source_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people: `text (gemma3_text)`."""
        name = self.name.removesuffix("_config").replace("_", " ")
        return f"{name} ({self.model_type})" if name else self.model_type

    def kinds(self) -> dict[Attention, int]:
        """Each kind of attention with the number of layers that have it, in order of appearance."""
        found: dict[Attention, int] = {}
        for layer in self.layers:
            for attention in layer:
                found[attention] = found.get(attention, 0) + 1
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's configuration as far as attention goes.

    Attributes:
        name: of the file or its folder, for people.
        dtype: of its weights, as kernels name it: bf16 or fp16; bf16 where the configuration says nothing.
        cache_dtype: of the keys and values it keeps: `e4m3` where a quantised checkpoint says so; else `dtype`.
    """

    name: str
    model_type: str
    dtype: str
    cache_dtype: str
    parts: tuple[Part, ...] = field(default_factory=tuple)
