"""Contract of the compile on a second device: kernels are compiled again only where they could differ.

- Things given to a kernel are described alike when they are alike, and differently when any number in them differs.
- A kernel that sees nothing of the device is not compiled again; one that was handed a number of it, or asks for one
  itself, is, and then serves a single device: rule V7 refuses it.
"""

import dataclasses
import enum
import functools
import importlib.util
import json
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions, CompileRequest, Cubin, Worker
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import LaunchPlanError
from fa4build.families.kernel_views import UnreadableError, describe
from fa4build.families.sources import ingredients
from fa4build.plan import evaluate


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


@dataclasses.dataclass
class Params:
    tile: tuple
    parts: dict


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)

    def method(self):
        return self


def closing_over(number):
    return lambda: number


def doubly_linked(number):
    first = Holder(number=number)
    first.other = Holder(other=first)
    return first


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n,
        lambda n: [1, (2, n)],
        lambda n: {"a": {n}},
        lambda n: {n: "a"},
        lambda n: Slotted(n),
        lambda n: Params(tile=(128, n), parts={}),
        lambda n: Holder(params=Params(tile=(1,), parts={"x": Slotted(n)})),
        lambda n: functools.partial(max, n),
        lambda n: functools.partial(max, key=n),
        lambda n: closing_over(n),
        lambda n: Holder(n=n).method,
        lambda n: doubly_linked(n),
        lambda n: float(n),
    ],
)
def test_a_number_anywhere_is_seen(make):
    """Equal for two objects made alike, different when the number in them is another."""
    assert describe(make(143)) == describe(make(143))
    assert describe(make(143)) != describe(make(207))


def test_kinds_are_told_apart():
    """A number, its text, a true value and members of an enumeration are different things."""
    values = [1, 1.0, "1", True, None, Colour.RED, Colour.BLUE, (1,), [1], int, float]

    assert len({repr(describe(value)) for value in values}) == len(values)


def test_what_cannot_be_listed_is_no_evidence():
    """An object without attributes, such as an iterator: refused, so that the kernel is compiled again."""
    with pytest.raises(UnreadableError, match="list_iterator"):
        describe(Holder(position=iter([1, 2])))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The three toy hosts compiled: host -> (result, what the second compile was)."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    directory = tmp_path_factory.mktemp("questions")
    module = "tests.kernels_toy.device_questions"
    worker = Worker(setup=f"{module}:setup", blocked_modules=())
    found, directories = {}, {}
    with LocalExecutor(current_toolchain(), jobs=1, timeout_s=120, worker=worker) as executor:
        for host in ("Grid", "Handed", "Inside"):
            request = CompileRequest(
                name=host,
                target="sm_90a",
                symbol=host.lower(),
                function=f"{module}:compile_kernel",
                payload={"host": host},
                sources=ingredients("toy", [f"{module}:compile_kernel"], []).files,
            )
            executor.submit(request, CompileOptions(), directory / host)
            directories[host] = directory / host
            found[host] = executor.wait().result
    return {host: (found[host], json.loads(Path(d, "second.json").read_text())) for host, d in directories.items()}


def test_a_grid_that_follows_the_device_needs_no_second_kernel(results):
    """1000 rows on 148 multiprocessors are 148 blocks, on 7 they are 7, 5 rows are 5."""
    cubin, second = results["Grid"]

    assert isinstance(cubin, Cubin), cubin
    assert second == {"with_kernels": False, "found": True}
    inputs = {"out.ptr": 256, "out.stride[0]": 1}
    for rows, sm_count, blocks in ((1000, 148, 148), (1000, 7, 7), (5, 148, 5)):
        (launch,) = evaluate(cubin.plan, {**inputs, "out.shape[0]": rows, "dev.sm_count": sm_count})
        assert launch.grid == (blocks, 1, 1)


@pytest.mark.parametrize("host", ["Handed", "Inside"])
def test_a_kernel_that_sees_the_device_is_compiled_again_and_refused(results, host):
    """Its number is part of the code: two devices, two cubins."""
    error, second = results[host]

    assert second == {"with_kernels": True, "found": True}
    assert isinstance(error, LaunchPlanError)
    assert "give two cubins" in str(error)
