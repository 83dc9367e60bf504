"""A cache shared over a network: the HTTP dialect of bazel-remote (`/ac/<key>`, `/cas/<sha256>`), or a directory.

An entry is an ActionResult whose output files are the action document of `cache.py` and its objects, so that a server
that checks its action cache accepts it and never serves an action whose blobs it has evicted. What arrives is checked
like what is on disk: blobs against their sha256, the action against its key, the cubin against what the action says of
it. Read only unless asked otherwise. A server that does not answer, or answers with anything but HTTP, is a miss, told
once: the local cache is complete without it. No server ends a build, or holds a transfer longer than `DEADLINE_S`.

What a server may do better the next time (no connection, 429, 5xx) is asked again, `TRIES` times, after pauses that
double and are random, so that a farm does not ask in step. Then it is left alone for a while, which doubles too; after
that one request tries it, and everything goes on when that is answered. Look-ups of a whole matrix run side by side.

Sources: Bazel remote execution API v2, messages ActionResult, OutputFile and Digest; bazel-remote's README, HTTP API.
"""

import base64
import hashlib
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from fa4build.errors import CacheCorruptError, WheelError
from fa4build.files import write_atomically
from fa4build.store.cache import Cache
from fa4build.store.entries import OBJECTS, CacheEntry
from fa4build.store.kernel_check import check_kernel, claim_of_entry

ACTION_FILE = "action.json"
TIMEOUT_S = 30.0
"""How long a server may say nothing."""

DEADLINE_S = 60.0
"""How long one blob may take, from the look-up of the host to its last byte: a slow drip never says nothing."""

_MAX_BLOB_BYTES = 256 << 20
_MAX_WARNING = 400

TRIES = 3
PAUSE_S = 0.2
"""Mean pause before the second try; twice as long before the third."""

OPEN_S, MAX_OPEN_S = 15.0, 240.0
"""How long a server that failed is left alone: the first time, and at most."""

LOOKUPS = 16
"""How many entries are fetched at a time."""

_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))


class RemoteCacheWarning(UserWarning):
    """The remote cache was not reached, or sent something else than was asked for; the build goes on without it."""


class Store(Protocol):
    """Blobs by path (`ac/<key>`, `cas/<sha256>`). Raises: OSError."""

    def get(self, path: str) -> bytes | None: ...
    def put(self, path: str, data: bytes) -> None: ...


class DirectoryStore:
    """`file://`: a directory, for example on a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, path: str) -> bytes | None:
        """The blob, None if there is none."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes) -> None:
        """Store a blob, whole or not at all."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to http and https alone, never from https to http, and tells no other host the password."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request. Raises: HTTPError for a redirect that is not followed."""
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            raise urllib.error.HTTPError(req.full_url, code, f"redirected to {new.scheme}:, not followed", headers, fp)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and old.netloc != new.netloc:
            following.remove_header("Authorization")
        return following


class HttpStore:
    """`http://` and `https://`; a user and password in the URL are sent as basic authentication."""

    def __init__(self, url: str) -> None:
        self._opener = urllib.request.build_opener(_SafeRedirects)
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._base = urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._headers = {"User-Agent": "fa4build"}
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()

    def get(self, path: str) -> bytes | None:
        """The blob, None if there is none.

        Raises: OSError for any other answer, for a blob over 256 MiB, and after `DEADLINE_S`.
        """
        data = _before_deadline(lambda: self._get(path))
        if data is not None and len(data) > _MAX_BLOB_BYTES:
            raise OSError(f"{path}: larger than {_MAX_BLOB_BYTES} bytes")
        return data

    def put(self, path: str, data: bytes) -> None:
        """Store a blob. Raises: as `get`."""
        _before_deadline(lambda: self._open("PUT", path, data).close())

    def _get(self, path: str) -> bytes | None:
        try:
            with self._open("GET", path, None) as response:
                return response.read(_MAX_BLOB_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    def _open(self, method: str, path: str, data: bytes | None) -> Any:
        request = urllib.request.Request(f"{self._base}/{path}", data=data, method=method, headers=self._headers)
        return self._opener.open(request, timeout=TIMEOUT_S)


def _before_deadline(transfer: Callable[[], bytes | None]) -> bytes | None:
    """What a transfer comes to. Raises: OSError for whatever it raised, and after `DEADLINE_S`.

    In a thread of its own, which is left behind at the deadline: a host look-up, a handshake and a header that comes
    byte by byte have no timeout that covers all of them.
    """
    done: list[bytes | None] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(transfer())
        except Exception as error:  # whatever a server makes http.client, ssl or a codec raise
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if failed:
        error = failed[0]
        raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}") from error
    if not done:
        raise OSError(f"not done after {DEADLINE_S:g} s")
    return done[0]


def store_at(url: str) -> Store:
    """The store at a URL. Raises: ValueError for a scheme that is none of file, http, https."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryStore(Path(urllib.request.url2pathname(parts.path)))
    if parts.scheme in ("http", "https") and parts.netloc:
        return HttpStore(url)
    raise ValueError(f"{url!r}: allowed are http://host[:port][/instance], https://... and file:///directory")


def _may_pass_again(error: OSError) -> bool:
    """Whether a server may answer better the next time. A deadline that has passed is not waited for twice."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _AGAIN
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, ConnectionError)


class _Circuit:
    """Whether a server is asked. Closed: yes. Open: not before a time. Half open: one request tries it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed_again_at = 0.0
        self._pause_s = 0.0
        self._is_tried = False

    def lets_through(self) -> bool:
        """Whether a request may go out now."""
        with self._lock:
            if not self._pause_s:
                return True
            if self._is_tried or time.monotonic() < self._closed_again_at:
                return False
            self._is_tried = True
            return True

    def passed(self) -> None:
        """A request was answered."""
        with self._lock:
            self._pause_s, self._is_tried = 0.0, False

    def failed(self) -> bool:
        """A request was not answered. Returns whether that is news."""
        with self._lock:
            is_news = not self._pause_s
            if is_news or self._is_tried:
                self._pause_s = min(MAX_OPEN_S, 2 * self._pause_s or OPEN_S)
                self._closed_again_at = time.monotonic() + self._pause_s
            self._is_tried = False
            return is_news


class SharedCache(Cache):
    """A local cache in front of a remote one. What is fetched is kept locally; what is compiled is sent if `writes`."""

    def __init__(self, root: Path, store: Store, *, writes: bool = False, below: Cache | None = None) -> None:
        super().__init__(root, below=below)
        self._store_remote = store
        self._writes = writes
        self._circuit = _Circuit()
        self._absent: set[str] = set()  # what a server answered that it has not: nobody asks twice

    def get(self, key: str) -> CacheEntry | None:
        """As `Cache.get`, then from the remote cache."""
        entry = super().get(key)
        if entry is not None or key in self._absent:
            return entry
        return self._get_remote(key)

    def look_ahead(self, keys: Iterable[str]) -> None:
        """Fetch what is there of these keys, `LOOKUPS` at a time."""
        wanted = [key for key in dict.fromkeys(keys) if not self._action_path(key).exists()]
        with ThreadPoolExecutor(max_workers=LOOKUPS) as pool:
            for _ in pool.map(self._get_remote, wanted):
                pass

    def _get_remote(self, key: str) -> CacheEntry | None:
        if not self._circuit.lets_through():
            return None
        try:
            entry = self._asked(lambda: self._fetch_checked(key))
        except OSError as error:
            if self._circuit.failed():
                _warn(f"remote cache: {error}; going on without it")
            return None
        if entry is None:
            self._absent.add(key)
        return entry

    def _asked(self, transfer: Callable[[], "CacheEntry | None"]) -> CacheEntry | None:
        """What a transfer comes to, tried again where that may help. Raises: OSError."""
        for attempt in range(TRIES):
            try:
                entry = transfer()
            except OSError as error:
                if attempt + 1 == TRIES or not _may_pass_again(error):
                    raise
                time.sleep(random.uniform(0.5, 1.5) * PAUSE_S * 2**attempt)
            else:
                self._circuit.passed()
                return entry
        raise AssertionError("the last try returns or raises")

    def _fetch_checked(self, key: str) -> CacheEntry | None:
        """As `_fetch`; what is no entry is told and absent."""
        try:
            return self._fetch(key)
        except (CacheCorruptError, WheelError, ValueError, TypeError, LookupError, RecursionError) as error:
            _warn(f"remote cache: entry {key}: {error} It counts as absent.")
        return None

    def put(
        self, *, name: str, inputs: Mapping[str, Any], facts: Mapping[str, Any], objects: Mapping[str, bytes]
    ) -> CacheEntry:
        """As `Cache.put`, then to the remote cache if it is to be written."""
        entry = super().put(name=name, inputs=inputs, facts=facts, objects=objects)
        if self._writes and self._circuit.lets_through():
            try:
                self._asked(lambda: self._send(entry))
            except OSError as error:
                self._circuit.failed()
                _warn(f"remote cache: {entry.name} could not be stored: {error}; going on without it")
        return entry

    def _fetch(self, key: str) -> CacheEntry | None:
        """Take an entry over, once all of it has been checked."""
        result = self._store_remote.get(f"ac/{key}")
        if result is None:
            return None
        digests = read_action_result(result)
        if set(digests) != {ACTION_FILE, *OBJECTS}:
            raise ValueError(f"holds {', '.join(sorted(digests))}.")
        blobs = {}
        for name, (sha256, size) in digests.items():
            data = self._store_remote.get(f"cas/{sha256}")
            if data is None:
                return None  # evicted
            if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError(f"its {name} does not match its digest.")
            blobs[name] = data
        return self.adopt(key, blobs.pop(ACTION_FILE), blobs, accept=_check_entry)

    def _send(self, entry: CacheEntry) -> None:
        """Blobs first, so that a reader never finds an action without them."""
        blobs = {name: self.read(entry, name) for name in OBJECTS}
        blobs[ACTION_FILE] = self.action(entry.key)
        digests = {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in blobs.items()}
        for name, (sha256, _) in digests.items():
            self._store_remote.put(f"cas/{sha256}", blobs[name])
        self._store_remote.put(f"ac/{entry.key}", action_result(digests))


def _check_entry(entry: CacheEntry, objects: Mapping[str, bytes]) -> None:
    """Refuse an entry whose cubin or plan is another kernel's. Raises: WheelError."""
    claim = claim_of_entry(entry.name, entry.inputs, entry.facts)
    check_kernel(claim, objects["cubin"], objects["plan"], remedy="Find out who writes to this cache.")


def _warn(message: str) -> None:
    """One line, and nothing in it that a terminal would obey: parts of it are what a server sent."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    warnings.warn(line[:_MAX_WARNING], RemoteCacheWarning, stacklevel=4)


# --- ActionResult, as far as it is needed -----------------------------------------------------------------------------

_OUTPUT_FILES = 2  # of ActionResult
_PATH, _DIGEST = 1, 2  # of OutputFile
_HASH, _SIZE_BYTES = 1, 2  # of Digest
_VARINT, _BYTES = 0, 2  # wire types


def action_result(files: Mapping[str, tuple[str, int]]) -> bytes:
    """An ActionResult (protobuf) with these output files: path -> (sha256 in hex, bytes)."""
    encoded = b""
    for path, (sha256, size) in sorted(files.items()):
        digest = _field(_HASH, sha256.encode()) + _number(_SIZE_BYTES, size)
        encoded += _field(_OUTPUT_FILES, _field(_PATH, path.encode()) + _field(_DIGEST, digest))
    return encoded


def read_action_result(data: bytes) -> dict[str, tuple[str, int]]:
    """The output files of an ActionResult; other fields are passed over. Raises: ValueError if it is none."""
    files = {}
    for number, value in _fields(data):
        if number == _OUTPUT_FILES and isinstance(value, bytes):
            file = dict(_fields(value))
            digest = dict(_fields(_bytes(file.get(_DIGEST))))
            sha256, size = _bytes(digest.get(_HASH)).decode(), digest.get(_SIZE_BYTES, 0)
            if len(sha256) != 64 or set(sha256) - set("0123456789abcdef") or not isinstance(size, int):
                raise ValueError("has a digest that is none.")
            files[_bytes(file.get(_PATH)).decode()] = (sha256, size)
    return files


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("is no action result.")
    return value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message; fixed-width fields are passed over."""
    place = 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        number, wire = tag >> 3, tag & 7
        value, place = _read_varint(data, place) if wire in (_VARINT, _BYTES) else (0, place)
        if wire == _BYTES:
            if place + value > len(data):
                raise ValueError("is cut short.")
            yield number, data[place : place + value]
            place += value
        elif wire == _VARINT:
            yield number, value
        elif wire in (1, 5):
            place += 8 if wire == 1 else 4
        else:
            raise ValueError("is no action result.")


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("is cut short.")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("is no action result.")
