"""Contract of the backward where another family is asked for: by its recipe, and by our kernels where that has none.

- `FA4_KERNELS_FAMILY` names a family whose packs describe `bwd`: dense gradients are its recipe's, called with the
  forward's results under the recipe's names.
- No recipe that fits, a gradient of lse, a soft cap or a sink: our own kernels, as without a family.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fa4_kernels")

from fa4_kernels import gradients  # noqa: E402
from fa4_kernels.dispatch import Problem  # noqa: E402
from fa4_kernels.errors import NoKernelError  # noqa: E402
from fa4_kernels.windows import Offsets  # noqa: E402

SHAPE = (1, 5, 2, 64)


def runtime(family, described_by):
    """Of a runtime, what the choice reads: the family asked for, and one pack."""
    recipes = ({"op": "bwd"},)
    pack = SimpleNamespace(manifest=SimpleNamespace(family=described_by, recipes=recipes, entries=()))
    return SimpleNamespace(family=family, packs=(pack,))


def problem(**changes):
    """A dense causal backward."""
    return Problem(**{"op": "bwd", "dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "mask": "causal"} | changes)


@pytest.fixture
def ours(monkeypatch):
    """Our kernels cannot be loaded here: that they are asked for is what shows."""

    def load(*arguments):
        raise NoKernelError("ours")

    monkeypatch.setattr(gradients, "_load_ours", load)
    monkeypatch.setattr(gradients, "usable", lambda packs: packs)


def tensors():
    """q, k, v, out and lse."""
    q, k, v, out = (torch.full(SHAPE, float(i)) for i in range(4))
    return q, k, v, out, torch.zeros(1, 2, 5)


@pytest.mark.parametrize(
    ("family", "described_by", "changes"),
    [
        (None, "upstream", {}),
        ("fa4", "fa4", {}),
        ("upstream", "quack", {}),
        ("upstream", "upstream", {"layout": "varlen"}),
        ("upstream", "upstream", {"features": frozenset({"softcap"})}),
    ],
)
def test_ours_where_no_other_family_describes_it(ours, family, described_by, changes):
    """No family asked for, ours, one whose packs describe no backward, packed sequences, features."""
    with pytest.raises(NoKernelError, match="ours"):
        gradients.load_backward(runtime(family, described_by), problem(**changes), 0, torch.device("cpu"))


@pytest.mark.parametrize(("mask", "window"), [("causal", Offsets(1 << 30, 0)), ("local", Offsets(7, 3))])
def test_the_recipe_gets_the_results_of_the_forward(ours, monkeypatch, mask, window):
    """By name, contiguous, with the window only where the recipe takes one; its results are the gradients."""
    seen = {}
    answer = tuple(torch.full(SHAPE, float(i)) for i in (7, 8, 9))

    def call(op, **arguments):
        seen.update(arguments, op=op)
        return answer

    monkeypatch.setattr(gradients, "call", call)
    launches = gradients.load_backward(
        runtime("upstream", "upstream"), problem(mask=mask, deterministic=True), 0, torch.device("cpu")
    )
    dout = torch.ones(5, 1, 2, 64).transpose(0, 1)
    dq, dk, dv, dsink = gradients.compute_gradients(launches, tensors(), dout, None, 0.125, window)

    assert (dq is answer[0], dk is answer[1], dv is answer[2], dsink) == (True, True, True, None)
    assert (seen["op"], seen["mask"], seen["deterministic"], seen["softmax_scale"]) == ("bwd", mask, True, 0.125)
    assert seen["dout"].is_contiguous()
    assert torch.equal(seen["dout"], dout)
    assert [float(seen[name].flatten()[0]) for name in ("q", "k", "v", "out", "lse")] == [0.0, 1.0, 2.0, 3.0, 0.0]
    expected = {"window_left": 7, "window_right": 3} if mask == "local" else {}
    assert {name: value for name, value in seen.items() if name.startswith("window")} == expected


def test_ours_where_no_recipe_fits_and_for_gradients_of_lse(ours, monkeypatch):
    """Another GQA ratio than the packs hold; a loss that uses lse."""

    def refuse(op, **arguments):
        raise NoKernelError("no recipe")

    monkeypatch.setattr(gradients, "call", refuse)
    launches = gradients.load_backward(runtime("upstream", "upstream"), problem(), 0, torch.device("cpu"))
    for dlse in (None, torch.zeros(1, 2, 5)):
        with pytest.raises(NoKernelError, match="ours"):
            gradients.compute_gradients(launches, tensors(), torch.ones(SHAPE), dlse, 0.125, Offsets(1 << 30, 0))
