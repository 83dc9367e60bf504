"""Contract of bundles and of the index in them.

A bundle is a pure function of its wheels: the same files, byte for byte, in any directory. Its index follows PEP 503,
691 and 658; its requirements lock every wheel. Any change of any file is noticed by the check that travels with it,
which needs nothing but Python's standard library. Nothing but a bundle is ever replaced.
"""

import dataclasses
import hashlib
import html.parser
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.errors import BundleError, WheelError
from fa4build.matrix.arch import arch_named
from fa4build.shipping.bundle import check_target, requirements_text, write_bundle
from fa4build.shipping.index import describe_wheel, index_files
from fa4build.shipping.signing import SigningKey, new_key
from fa4build.shipping.wheel import prepare_pack_wheel
from fa4build.shipping.wheel_file import Metadata, WheelSource, _archive, read_wheel, wheel_bytes
from fa4build.store.evidence import Evidence
from tests.artifacts import TOOLCHAIN, made_up_artifact, proven

NO_NETWORK = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def other_wheel(directory: Path, name: str = "torch", version: str = "2.6.0", tag: str = "py3-none-any") -> Path:
    """A small wheel of another project."""
    metadata = Metadata(name=name, version=version, summary="s", description="d", license_expression="MIT")
    files = {f"{name}/__init__.py": b""}
    source = WheelSource(metadata=metadata, tag=tag, is_pure=True, files=files, licenses={}, sboms={})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / source.file_name
    path.write_bytes(wheel_bytes(source))
    return path


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    """A signing key."""
    return new_key(tmp_path_factory.mktemp("keys"), "release")[2]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, key: SigningKey) -> list[Path]:
    """Signed pack wheels of two targets."""
    out = tmp_path_factory.mktemp("packs")
    paths = []
    for name in ("sm90", "sm100"):
        arch = arch_named(name)
        artifacts = [made_up_artifact(head_dim=dim, target=arch.target) for dim in (64, 128)]
        prepared = prepare_pack_wheel(artifacts, arch=arch, toolchain=TOOLCHAIN, out_dir=out, sign=key)
        paths.append(prepared.write().path)
    return paths


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, packs: list[Path], key: SigningKey) -> Path:
    """A signed bundle of two packs and a wheel of another project."""
    directory = tmp_path_factory.mktemp("bundle")
    return write_bundle(directory / "out", packs, include=[other_wheel(directory)], sign=key).path


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Path -> bytes and mode."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777) for path in files}


def verify(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the bundle's own check, isolated from this environment."""
    command = ["sh", str(root / "verify.sh"), *arguments]
    environment = {**NO_NETWORK, "PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_equal_wheels_give_equal_bundles(
    bundle: Path, packs: list[Path], key: SigningKey, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Another directory, another order, another umask: bytes and modes are equal."""
    previous = os.umask(0o077)
    request.addfinalizer(lambda: os.umask(previous))
    again = write_bundle(tmp_path / "deep" / "er", packs[::-1], include=[other_wheel(tmp_path / "torch")], sign=key)

    assert contents(again.path) == contents(bundle)
    assert again.num_files == len(contents(bundle))
    assert again.size == sum(len(data) for data, _ in contents(bundle).values())


def test_what_is_in_a_bundle(bundle: Path) -> None:
    """Wheels with their metadata, both forms of the index, digests, description, check, and pages."""
    assert sorted(contents(bundle)) == [
        "README.md",
        "SHA256SUMS",
        "SHA256SUMS.sig",
        "bundle.cdx.json",
        "bundle.json",
        "requirements.txt",
        "signer.pub",
        *(
            f"simple/{place}index.{form}"
            for place in ("fa4-kernels-sm100a/", "fa4-kernels-sm90a/")
            for form in ("html", "json")
        ),
        "simple/index.html",
        "simple/index.json",
        "simple/torch/index.html",
        "simple/torch/index.json",
        "tools/__main__.py",
        *(f"tools/bundle_check/{name}.py" for name in ("__init__", "ed25519", "errors", "trust")),
        "verify.sh",
        *(
            f"wheels/{name}{suffix}"
            for name in (
                "fa4_kernels_sm100a-0.1.0-py3-none-any.whl",
                "fa4_kernels_sm90a-0.1.0-py3-none-any.whl",
                "torch-2.6.0-py3-none-any.whl",
            )
            for suffix in ("", ".metadata")
        ),
    ]
    description = json.loads((bundle / "bundle.json").read_text())
    assert [pack["kernels"] for pack in description["packs"]] == [
        ["fwd-sm100a-bf16-hd128-causal", "fwd-sm100a-bf16-hd64-causal"],
        ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd64-causal"],
    ]


class Links(html.parser.HTMLParser):
    """The links of a page, as attribute mappings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def test_the_index_resolves_to_the_wheels(bundle: Path) -> None:
    """HTML and JSON say the same: relative URL of a file that is there, its digest and that of its metadata."""
    projects = [link["href"] for link in Links((bundle / "simple" / "index.html").read_text()).found]
    assert projects == ["fa4-kernels-sm100a/", "fa4-kernels-sm90a/", "torch/"]
    for project in projects:
        page = bundle / "simple" / project
        (link,) = Links((page / "index.html").read_text()).found
        (file,) = json.loads((page / "index.json").read_text())["files"]
        url, _, fragment = link["href"].partition("#")
        wheel = (page / url).resolve()
        metadata = hashlib.sha256(wheel.with_name(wheel.name + ".metadata").read_bytes()).hexdigest()

        assert url == file["url"]
        assert fragment == f"sha256={file['hashes']['sha256']}" == f"sha256={describe_wheel(wheel).sha256}"
        assert link["data-core-metadata"] == link["data-dist-info-metadata"] == f"sha256={metadata}"
        assert file["core-metadata"] == {"sha256": metadata}
        assert link["data-requires-python"] == file["requires-python"] == ">=3.10"
        assert file["size"] == wheel.stat().st_size


def test_requirements_lock_every_wheel(bundle: Path) -> None:
    """One line a project, one hash a wheel; two hosts' wheels of one project stand together."""
    wheels = [describe_wheel(path) for path in sorted((bundle / "wheels").glob("*.whl"))]
    text = requirements_text(wheels).decode()

    assert (bundle / "requirements.txt").read_text() == text
    assert [line.split("==")[0] for line in text.splitlines() if "==" in line] == [w.project for w in wheels]
    assert all(f"--hash=sha256:{wheel.sha256}" in text for wheel in wheels)


def test_the_sbom_names_wheels_compilers_and_sources(bundle: Path) -> None:
    """Valid CycloneDX: wheels by digest, compiler distributions, ptxas, rendered sources, licence texts."""
    text = (bundle / "bundle.cdx.json").read_text()
    document = json.loads(text)
    names = {component["name"] for component in document["components"]}
    tools = {tool["name"]: tool["version"] for tool in document["metadata"]["tools"]["components"]}

    assert {"torch-2.6.0-py3-none-any.whl", "rendered/fwd-sm90a-bf16-hd64-causal.py", "licenses/LICENSE"} <= names
    assert tools.items() >= TOOLCHAIN.items()
    schema = pytest.importorskip("cyclonedx.schema")
    validation = pytest.importorskip("cyclonedx.validation.json")
    assert validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(text) is None


def test_the_check_passes_on_what_was_written(bundle: Path, tmp_path: Path) -> None:
    """Copied elsewhere, with an isolated interpreter; also when asked for the signer."""
    copy = shutil.copytree(bundle, tmp_path / "a copy")
    plain, signed = verify(copy), verify(copy, "--key", str(copy / "signer.pub"))

    assert plain.returncode == signed.returncode == 0, plain.stderr + signed.stderr
    assert "ok: fa4_kernels_sm90a-0.1.0-py3-none-any.whl: 10 files, 2 kernels" in plain.stdout
    assert "SHA256SUMS signed by" in signed.stdout
    assert contents(copy) == contents(bundle)  # it writes nothing, not even bytecode


def test_the_check_uses_the_standard_library_alone(bundle: Path) -> None:
    """Every import of the tools is of it, or of a file beside."""
    import ast

    for path in (bundle / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"bundle_check"}


def damage_byte(root: Path) -> None:
    path = root / "wheels" / "torch-2.6.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def relist(root: Path) -> None:
    """Write digests for what is there now, as an attacker would."""
    names = sorted(set(contents(root)) - {"SHA256SUMS", "SHA256SUMS.sig"})
    digests = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
    (root / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def damage_and_relist(root: Path) -> None:
    damage_byte(root)
    relist(root)


def edit_page_and_relist(root: Path) -> None:
    (root / "README.md").write_text("another\n")
    relist(root)


@pytest.mark.parametrize(
    ("damage", "arguments", "said"),
    [
        pytest.param(damage_byte, [], "torch-2.6.0-py3-none-any.whl differs from SHA256SUMS", id="flipped byte"),
        pytest.param(lambda root: (root / "extra").write_text(""), [], "extra is not listed", id="extra file"),
        pytest.param(lambda root: (root / "README.md").unlink(), [], "README.md is missing", id="missing file"),
        pytest.param(
            lambda root: ((root / "README.md").unlink(), (root / "README.md").symlink_to("bundle.json")),
            *([], "README.md differs"),
            id="link",
        ),
        pytest.param(damage_and_relist, [], "requirements.txt and wheels/ do not hold the same", id="relisted wheel"),
        pytest.param(
            edit_page_and_relist, ["--key", "signer.pub"], "was changed after signing", id="relisted, but signed"
        ),
        pytest.param(
            lambda root: (root / "SHA256SUMS.sig").unlink(), ["--key", "signer.pub"], "is not signed", id="unsigned"
        ),
    ],
)
def test_the_check_notices_every_change(bundle: Path, tmp_path: Path, damage, arguments: list, said: str) -> None:
    """What changed and what that means, on stderr, with exit status 1."""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    damage(copy)
    done = verify(copy, *(str(copy / part) if part.endswith(".pub") else part for part in arguments))

    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("files", "points", "said"),
    [
        pytest.param({"zz.pth": b"import os\n"}, {}, "zz.pth", id="run at start"),
        pytest.param({"sitecustomize.py": b""}, {}, "sitecustomize.py", id="module"),
        pytest.param({}, {"console_scripts": {"pip": "os:abort"}}, "console_scripts", id="command"),
    ],
)
def test_a_signed_pack_wheel_holds_its_pack_alone(bundle: Path, tmp_path: Path, files, points, said) -> None:
    """RECORD, digests and the pack's own signature are right, as an attacker would have them; refused on both sides."""
    root = shutil.copytree(bundle, tmp_path / "copy")
    path = next((root / "wheels").glob("fa4_kernels_sm90a*.whl"))
    before = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    wheel = read_wheel(path)
    text = wheel.files[f"{wheel.dist_info}/entry_points.txt"] + b"".join(
        f"\n[{group}]\n{name} = {value}\n".encode() for group, rows in points.items() for name, value in rows.items()
    )
    members = {**wheel.files, **files, f"{wheel.dist_info}/entry_points.txt": text}
    path.write_bytes(_archive(members, wheel.dist_info))
    after = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    for page in (page for page in root.rglob("*") if page.is_file()):
        page.write_bytes(page.read_bytes().replace(before, after))
    relist(root)

    done = verify(root)
    assert done.returncode == 1
    assert said in done.stderr
    with pytest.raises(WheelError, match="A pack is data only"):
        write_bundle(tmp_path / "again", [path])


def test_another_key_is_not_the_signers(bundle: Path, tmp_path: Path) -> None:
    """Named, so that a person can see which is which."""
    _, public, other = new_key(tmp_path, "other")
    done = verify(bundle, "--key", str(public))

    assert done.returncode == 1
    assert f"not by {other.key_id}" in done.stderr


FLIP = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/tools")
from bundle_check import BundleDamaged, check_bundle
root, missed = Path(sys.argv[1]), []
for name, place in json.loads(sys.stdin.read()):
    whole = (root / name).read_bytes()
    changed = bytearray(whole)
    changed[place] ^= 1 << place % 8
    (root / name).write_bytes(changed)
    try:
        check_bundle(root, [])
        missed.append(name)
    except BundleDamaged:
        pass
    (root / name).write_bytes(whole)
print(json.dumps([missed, len(check_bundle(root, []))]))
"""


def test_flipped_bytes_anywhere_are_noticed(bundle: Path, tmp_path: Path) -> None:
    """200 places drawn over all files by size, with the seed 1, by the check itself in this process."""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    draw = random.Random(1)
    files = {name: len(data) for name, (data, _) in contents(copy).items() if data and name != "SHA256SUMS.sig"}
    names = draw.choices(list(files), weights=list(files.values()), k=200)
    places = [(name, draw.randrange(files[name])) for name in names]
    command = [sys.executable, "-I", "-B", "-c", FLIP, str(copy)]
    done = subprocess.run(command, input=json.dumps(places), capture_output=True, text=True, timeout=120)

    assert json.loads(done.stdout) == [[], 4], done.stderr


def test_nothing_but_a_bundle_is_replaced(bundle: Path, packs: list[Path], tmp_path: Path) -> None:
    """A directory with anything else stays as it is; a bundle is replaced as a whole; an empty directory is taken."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="is no bundle, so it is left alone"):
        write_bundle(out, packs)
    assert (out / "thesis.tex").read_text() == "years of work"

    (out / "thesis.tex").unlink()
    write_bundle(out, packs)
    write_bundle(out, packs[:1])
    assert not (out / "simple" / "fa4-kernels-sm100a").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_does_not_belong_together_is_refused(packs: list[Path], tmp_path: Path) -> None:
    """Two versions, a wheel twice, none of ours, no wheel at all, a damaged one: nothing is written."""
    first, second = other_wheel(tmp_path / "a"), other_wheel(tmp_path / "b", version="2.7.0")
    damaged = tmp_path / packs[0].name
    damaged.write_bytes(packs[0].read_bytes()[:-1] + b"x")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    for wheels, include, reason in (
        (packs, [first, second], "torch: 2.6.0 and 2.7.0"),
        (packs, [first, first], "torch-2.6.0-py3-none-any.whl: twice"),
        ([], [first], "no wheel of fa4-kernels"),
        (packs, [tmp_path / "empty"], "holds no wheel"),
    ):
        with pytest.raises(BundleError, match=reason):
            write_bundle(out, wheels, include=include)
    with pytest.raises(WheelError):
        write_bundle(out, [damaged])
    with pytest.raises(BundleError, match=r"no wheel \("):
        describe_wheel(Path(__file__))
    assert not out.exists()


def test_the_index_escapes_what_it_shows(tmp_path: Path) -> None:
    """`>=3.10` inside an attribute is `&gt;=3.10`."""
    page = index_files([describe_wheel(other_wheel(tmp_path))])["simple/torch/index.html"].decode()

    assert 'data-requires-python="&gt;=3.10"' in page


def page_of(directory: Path, artifacts: list, name: str) -> str:
    """The operator's page of a bundle with one pack."""
    arch = arch_named(name)
    path = prepare_pack_wheel(artifacts, arch=arch, toolchain=TOOLCHAIN, out_dir=directory).write().path
    return (write_bundle(directory / "out", [path]).path / "README.md").read_text()


def test_the_page_is_for_the_gpus_of_the_bundle(tmp_path: Path) -> None:
    """A bundle for sm_100a names no other GPU's package, and says that none of its kernels has run on hardware."""
    artifacts = [made_up_artifact(head_dim=64, target="sm_100a"), made_up_artifact(head_dim=96, target="sm_100a")]
    page = page_of(tmp_path, [proven(artifacts[0], "simulated"), artifacts[1]], "sm100")

    assert "'fa4-kernels[sm100]'" in page
    assert "sm90" not in page
    assert "sm_90a" not in page
    assert "| `fa4-kernels-sm100a` | sm_100a | 2 | 1 simulated, 1 none |" in page
    assert "No sm_100a kernel here has run on hardware." in page
    assert "from fa4_kernels import flash_attn_func" in page
    assert 'fa4_kernels.require_evidence("simulated")' in page
    assert "@" not in page


def test_what_the_page_says_of_hardware_follows_from_the_records(tmp_path: Path) -> None:
    """One of two, both; a claim is none."""
    artifacts = [made_up_artifact(head_dim=dim) for dim in (64, 96)]
    first, second = (proven(artifact, "static", "silicon") for artifact in artifacts)
    claimed = dataclasses.replace(
        second, facts=dataclasses.replace(second.facts, evidence=Evidence(silicon={"device": "H200"}))
    )

    one = page_of(tmp_path / "1", [first, claimed], "sm90")
    assert "1 of the 2 sm_90a kernels here have run on hardware; the others have not." in one
    assert "1 silicon, 1 claimed" in one
    assert "Every sm_90a kernel here has run on hardware." in page_of(tmp_path / "2", [first, second], "sm90")


def test_the_metadata_of_a_pack_says_what_its_kernels_have_passed(tmp_path: Path) -> None:
    """What `pip show` and an index show."""
    artifact = proven(made_up_artifact(target="sm_103a"), "simulated")
    path = prepare_pack_wheel([artifact], arch=arch_named("sm103"), toolchain=TOOLCHAIN, out_dir=tmp_path).write().path
    text = describe_wheel(path).metadata.decode()

    assert "Evidence: 1 simulated. No sm_103a kernel here has run on hardware." in text
    assert "- `fwd-sm103a-bf16-hd128-causal`: simulated" in text


@pytest.mark.parametrize("name", ["file", "file/below", "directory"])
def test_a_target_that_cannot_be_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    """A file, a place below a file, a directory with other files."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").write_text("mine")
    with pytest.raises(BundleError, match=name.split("/")[0]):
        check_target(tmp_path / name)


def test_a_bundle_is_replaced_in_one_step(tmp_path: Path, packs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No moment without a bundle: nothing is ever renamed away from its place."""
    out = write_bundle(tmp_path / "out", packs).path
    moved: list[Path] = []
    real = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (moved.append(self), real(self, target))[1])
    write_bundle(out, packs[:1])

    assert out not in moved
    assert len(list((out / "wheels").glob("*.whl"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_a_key_the_check_says_what_it_did_not_check(bundle: Path, tmp_path: Path) -> None:
    """A bundle that anybody could have made again is whole; the last line says what that leaves open."""
    done = verify(bundle)
    assert done.returncode == 0, done.stderr
    assert "Who made it: its signature was not checked." in done.stdout

    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "SHA256SUMS.sig").unlink()
    assert "Who made it: it is not signed, nothing was checked." in verify(copy).stdout
    assert "Who made it" not in verify(bundle, "--key", str(bundle / "signer.pub")).stdout


def test_a_signature_of_any_bytes_is_damaged(bundle: Path, tmp_path: Path) -> None:
    """Bytes that no ASCII text has: one line, no traceback."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "SHA256SUMS.sig").write_bytes(b"signature \xff\xfe\n")
    done = verify(copy, "--key", str(bundle / "signer.pub"))

    assert done.returncode == 1
    assert "FAILED: SHA256SUMS.sig is damaged" in done.stderr
    assert "Traceback" not in done.stderr
