"""Contract of a foreign family from kernel to call, as docs/package-your-own-kernel.md says it.

`matrix` compiles it, a second run compiles nothing, `wheel` packs it with its recipe and notices, and
`fa4_kernels.call` launches what the kernel's own host code would launch. quack's kernels (optional, marker `upstream`)
are refused what they were not compiled for.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dsl, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
TOY = "tests.kernels_toy.scale_family:FAMILY"


def fa4build(*arguments: str) -> subprocess.CompletedProcess:
    """Run the command line from the checkout."""
    command = [sys.executable, "-m", "fa4build.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[str, ...]:
    """Options for a cache and an empty directory for wheels, and that directory, with the toy built and packed."""
    root = tmp_path_factory.mktemp("toy")
    cache = ("--cache-dir", str(root / "cache"))
    built = fa4build("matrix", "--family", TOY, "--arch", "sm90", *cache, "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["counts"] == {"cached": 0, "compiled": 1, "failed": 0}
    out = root / "dist"
    packed = fa4build(
        "wheel", "--family", TOY, "--arch", "sm90", "--no-runtime", "--assert-cached", *cache, "--out", str(out)
    )
    assert packed.returncode == 0, packed.stderr
    return (*cache, str(out))


def test_a_second_run_compiles_nothing(places):
    """`--assert-cached` proves it; other families and targets have keys of their own."""
    again = fa4build("matrix", "--family", TOY, "--arch", "sm90", "--assert-cached", *places[:2])
    other = fa4build("matrix", "--family", TOY, "--arch", "sm100", "--assert-cached", *places[:2])

    assert again.returncode == 0, again.stderr
    assert other.returncode == 11
    assert "scale_rows-sm100a-bf16-n256" in other.stderr


def test_the_wheel_is_called_after_its_family_and_holds_its_recipe(places):
    """`fa4-kernels-toy-sm90a`, found through the same entry-point group as ours."""
    (path,) = Path(places[2]).iterdir()
    with zipfile.ZipFile(path) as wheel:
        manifest = json.loads(wheel.read("fa4_kernels_toy_sm90a/manifest.json"))
        entry_points = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("entry_points.txt"))

    assert path.name.startswith("fa4_kernels_toy_sm90a-")
    assert "fa4-kernels-toy-sm90a = fa4_kernels_toy_sm90a" in entry_points
    assert (manifest["family"], [r["op"] for r in manifest["recipes"]]) == ("toy", ["scale_rows"])


def test_a_call_launches_what_the_host_code_says(places, launcher, fake, tmp_path):
    """A block a row; x, scale and out by pointer with their extents. A row of 255 is refused by name."""
    torch = pytest.importorskip("torch")
    from fa4_kernels import NoKernelError, call, loader, packs

    from tests.runtime.fake import fake_cubin, param_bytes

    (path,) = Path(places[2]).iterdir()
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path)
    pack = packs.open_pack("toy", tmp_path / "fa4_kernels_toy_sm90a")
    assert isinstance(pack, packs.Pack), pack

    class StandInReader(packs.PackReader):
        """The real plan, with a cubin that the stand-in driver takes."""

        def read(self, pack, entry):
            _, text = super().read(pack, entry)
            sizes = {k["kernel"]: [p.get("size", 128) for p in k["params"]] for k in json.loads(text)["launches"]}
            return fake_cubin(**sizes), text

    runtime = loader.Runtime(driver_path=fake.path, device_type=loader.CPU, packs=[pack], stream_of=lambda ordinal: 0)
    runtime._reader = StandInReader()
    loader.use_runtime(runtime)
    try:
        x, scale = torch.zeros(7, 256, dtype=torch.bfloat16), torch.ones(7)
        out = call("scale_rows", x=x, scale=scale)
        (launch,) = fake.launches
        data = param_bytes(launch)
        pointers = {int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) - 7, 8)}

        assert out.shape == (7, 256)
        assert (tuple(launch.grid), tuple(launch.block)) == ((7, 1, 1), (128, 1, 1))
        assert {x.data_ptr(), scale.data_ptr(), out.data_ptr()} <= pointers
        with pytest.raises(NoKernelError, match=r"x.shape\[1\] is 256, not 255"):
            call("scale_rows", x=x[:, :255], scale=scale)
    finally:
        loader.use_runtime(None)


@pytest.mark.upstream
@pytest.mark.slow
def test_quack_is_built_and_guarded(tmp_path):
    """One kernel of each op; another row length is refused by name; the licence is in the wheel."""
    pytest.importorskip("quack")
    from fa4build.plan import failed_guard, plan_from_json

    options = ("--family", "quack", "--arch", "sm90", "--select", "*-sm90a-bf16-n4096", "--cache-dir", str(tmp_path))
    built = fa4build("matrix", *options, "--json")
    assert built.returncode == 0, built.stderr
    names = [row["id"].split("-")[0] for row in json.loads(built.stdout)["variants"]]
    assert names == ["rmsnorm", "rmsnorm_bwd", "softmax", "softmax_bwd", "cross_entropy", "cross_entropy_bwd"]
    packed = fa4build("wheel", *options, "--no-runtime", "--assert-cached", "--out", str(tmp_path / "dist"))
    assert packed.returncode == 0, packed.stderr
    (path,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(path) as wheel:
        assert any(name.endswith("licenses/quack-kernels-LICENSE") for name in wheel.namelist())
    plans = [plan_from_json(p.read_text()) for p in (tmp_path / "objects").rglob("*") if _is_plan(p)]
    assert len(plans) == 6
    for plan in plans:
        tensor = next(arg.name for arg in plan.args if arg.kind == "tensor")
        inputs = dict(plan.vectors[0].inputs)
        assert failed_guard(plan, inputs) is None
        message = failed_guard(plan, inputs | {f"{tensor}.shape[1]": 4095})
        assert message is not None
        assert "4096" in message


def _is_plan(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:1] == b"{"
