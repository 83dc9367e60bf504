"""Reading and steering the stand-in driver (fake_driver.c), and small plans, cubins and packs for it."""

import ctypes
import hashlib
import json
import lzma
import struct
from pathlib import Path

MAX_BYTES = 4096


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("num_params", ctypes.c_uint32),
        ("sizes", ctypes.c_uint32 * 64),
        ("max_dynamic_smem", ctypes.c_int32),
        ("non_portable_cluster", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char * 64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("pdl", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("num_bytes", ctypes.c_uint32),
        ("maps_aligned", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("bytes", ctypes.c_ubyte * MAX_BYTES),
    )


class FakeDriver:
    """The shared library's own counters: the launcher opens the same file, so both see one state."""

    def __init__(self, path):
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_launch.restype = ctypes.POINTER(_Launch)
        self._library.fake_kernel.restype = ctypes.POINTER(_Kernel)

    def reset(self):
        self._library.fake_reset()

    def reset_launches(self):
        """Forget the launches so far, keep what is loaded."""
        self._library.fake_reset_launches()

    def fail(self, call, code=1):
        """Let a driver call return an error from now on."""
        self._library.fake_fail(call.encode(), code)

    def set_capability(self, major, minor):
        self._library.fake_capability(major, minor)

    def push_context(self, context):
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(context))

    @property
    def depth(self):
        """Contexts on the calling thread's stack."""
        return self._library.fake_depth()

    @property
    def num_loads(self):
        return self._library.fake_num_loads()

    @property
    def num_functions(self):
        """How often code was loaded onto a device."""
        return self._library.fake_num_functions()

    @property
    def num_maps(self):
        """How often a tensor map was made."""
        return self._library.fake_num_maps()

    @property
    def launches(self):
        return [self._library.fake_launch(i).contents for i in range(self._library.fake_num_launches())]

    def kernel(self, index):
        return self._library.fake_kernel(index).contents


def param_bytes(launch):
    """The recorded parameters, one after another."""
    return bytes(launch.bytes[: launch.num_bytes])


def read_map(data):
    """The fields of a tensor map made by the stand-in driver."""
    numbers = struct.unpack_from("<10Q5H12B", data)
    names = ("dtype", "rank", "interleave", "swizzle", "promotion", "fill", "made")
    rest = dict(zip(names, numbers[20:27], strict=True))
    assert rest.pop("made") == 0xA5
    rank = rest["rank"]
    lists = {"dims": numbers[1 : 1 + rank], "strides": numbers[6 : 5 + rank], "box": numbers[10 : 10 + rank]}
    return {"address": numbers[0], **lists, "elem_strides": numbers[15 : 15 + rank], **rest}


def fake_cubin(**kernels):
    """A cubin for the stand-in driver: kernel name -> sizes of its parameters."""
    lines = "".join(f"{name} {' '.join(map(str, sizes))}\n" for name, sizes in kernels.items())
    return b"\x7fELF" + lines.encode() + b"\0"


class Nodes:
    """Writes the node list of a plan: each call returns the index of a new node."""

    def __init__(self):
        self.list = []

    def __call__(self, op, type_, *operands):
        self.list.append([op, type_, *operands])
        return len(self.list) - 1


def make_plan(nodes, *, args, launches, guards=(), vectors=()):
    """A plan document around a node list."""
    return {
        "format": "fa4build.launchplan",
        "version": 1,
        "origin": {"kind": "handwritten"},
        "spec": {},
        "args": list(args),
        "nodes": nodes.list,
        "guards": list(guards),
        "launches": list(launches),
        "vectors": list(vectors),
    }


def launch_template(kernel, grid, params=(), **changes):
    """One launch of a plan; one warp, no cluster, no shared memory unless changed."""
    return {
        "kernel": kernel,
        "grid": list(grid),
        "block": [32, 1, 1],
        "cluster": [1, 1, 1],
        "smem": 0,
        "pdl": False,
        "cooperative": False,
        "params": list(params),
    } | changes


def forward_plan(kernel, dtype="bf16"):
    """A plan for the signature fwd/dense: a tensor map of q, the sizes and scalars, a grid over 128-row tiles.

    Parameters: map of q (head_dim, seqlen_q, num_heads_q, batch) with boxes of 64 x 128; then out.ptr (i64), lse.ptr
    (i64), softmax_scale (f32), window_left, window_right, num_sms (i32), seqlen_q, seqlen_k (i32): 40 bytes.
    """
    n = Nodes()
    two = n("const", "i64", 2)
    dims = [n("in", "i64", f"q.shape[{i}]") for i in (3, 1, 2, 0)]
    strides = [n("mul", "i64", n("in", "i64", f"q.stride[{i}]"), two) for i in (1, 2, 0)]
    address = n("in", "i64", "q.ptr")
    tiles = n("udiv", "i64", n("add", "i64", dims[1], n("const", "i64", 127)), n("const", "i64", 128))
    grid = [n("trunc", "i32", node) for node in (tiles, dims[2], dims[3])]
    fields = [n("in", "i64", "out.ptr"), n("in", "i64", "lse.ptr"), n("in", "f32", "softmax_scale")]
    fields += [n("in", "i32", name) for name in ("window_left", "window_right", "num_sms")]
    fields += [n("trunc", "i32", dims[1]), n("trunc", "i32", n("in", "i64", "k.shape[1]"))]
    seqlen_fits = n("sle", "i64", dims[1], n("const", "i64", 1 << 20))
    tensors = [("q", dtype, 4), ("k", dtype, 4), ("v", dtype, 4), ("out", dtype, 4), ("lse", "f32", 3)]
    args = [{"name": name, "kind": "tensor", "dtype": t, "rank": rank} for name, t, rank in tensors]
    scalars = [("softmax_scale", "f32"), ("window_left", "i32"), ("window_right", "i32"), ("num_sms", "i32")]
    args += [{"name": name, "kind": "scalar", "dtype": t} for name, t in scalars]
    tensor_map = {"kind": "tmap", "dtype": dtype, "addr": address, "dims": dims, "strides": strides}
    tensor_map |= {"box": [64, 128, 1, 1], "elem_strides": [1, 1, 1, 1], "swizzle": 128, "interleave": 0}
    tensor_map |= {"l2_promotion": 128, "oob_fill": "zero"}
    offsets = (0, 8, 16, 20, 24, 28, 32, 36)
    numbers = {"kind": "bytes", "size": 40, "align": 8, "fields": list(map(list, zip(offsets, fields, strict=True)))}
    launch = launch_template(kernel, grid, [tensor_map, numbers], block=[384, 1, 1], smem=200000)
    guard = {"expr": seqlen_fits, "message": "seqlen_q must be at most 1048576", "source": "spec"}
    return make_plan(n, args=args, launches=[launch], guards=[guard])


def entry_axes(variant_id):
    """The axes of a variant from its id, as the builder's manifest lists them."""
    op, _arch, dtype, head_dim, *fields = variant_id.split("-")
    mask = next((name for name in ("causal", "local") if name in fields), "full")
    layout = next((name for name in ("varlen", "paged") if name in fields), "dense")
    dims = [int(x) for x in head_dim.removeprefix("hd").split("x")]
    axes = {"dtype": dtype, "head_dim": dims[0], "head_dim_v": dims[-1], "mask": mask, "layout": layout}
    axes |= {name: name in fields for name in ("split", "deterministic", "softcap", "sink")}
    return op, axes | {"cta_group": 1}


def write_pack(directory: Path, variant_ids, *, target="sm_90a", change=None, plan=None, cubin=None):
    """A pack for the stand-in driver with one group; `change` edits the manifest document before it is written.

    Every entry has `forward_plan` and a cubin for it, unless `plan` and `cubin` are given.
    """
    from fa4_kernels.abi import ABI_HASH
    from fa4_kernels.evidence import record_digest

    from tests.summaries import summary

    directory.mkdir(parents=True, exist_ok=True)
    cubins, plans = [], []
    for name in variant_ids:
        symbol = name.replace("-", "_") + "_0"
        cubins.append(cubin or fake_cubin(**{symbol: (128, 40)}))
        dtype = "f16" if "-fp16-" in name else "bf16"
        plans.append(json.dumps(plan or forward_plan(symbol, dtype), sort_keys=True).encode())
    raw = b"".join((*cubins, *plans))
    stored = lzma.compress(raw)
    group = {"file": "group-000.xz", "sha256": hashlib.sha256(stored).hexdigest()}
    group |= {"size": len(stored), "raw_size": len(raw)}
    entries, offset = [], 0
    for name, blob in zip(variant_ids, cubins, strict=True):
        op, axes = entry_axes(name)
        entry = {"id": name, "op": op, "target": target, "axes": axes, "symbols": [name.replace("-", "_") + "_0"]}
        entry |= {"cubin": _blob(offset, blob)}
        entries.append(entry)
        offset += len(blob)
    for entry, blob in zip(entries, plans, strict=True):
        entry["plan"] = _blob(offset, blob)
        static = summary("static", target)
        digests = (entry["cubin"]["sha256"], entry["plan"]["sha256"])
        static["record"] = record_digest("static", entry["id"], *digests, static)
        entry["evidence"] = {"static": static, "simulated": None, "silicon": None}
        offset += len(blob)
    manifest = {"schema": 1, "pack": "fa4-kernels-test", "family": "fa4", "version": "0.1.0", "abi": ABI_HASH}
    manifest |= {"targets": [target], "toolchain": {}, "groups": [group], "entries": entries}
    if change is not None:
        change(manifest)
    (directory / "__init__.py").write_text('"""A pack of the tests."""\n')
    (directory / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")) + "\n")
    (directory / "group-000.xz").write_bytes(stored)
    write_seal(directory)
    return directory


def write_seal(directory: Path, signatures=()):
    """Seal a pack as it lies there now."""
    from fa4_kernels.trust import SEAL_FILE, SEALED_FILES, Seal

    digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in SEALED_FILES}
    seal = Seal(files=digests, signatures=tuple(signatures))
    (directory / SEAL_FILE).write_bytes(seal.text())
    return seal


def _blob(offset, data):
    return {"group": 0, "offset": offset, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
