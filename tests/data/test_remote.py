"""Files behind URLs: a server that answers as servers do on bad days, and one that checks signatures of S3."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest

KEY, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-west-3"


class Store(ThreadingHTTPServer):
    """Files by path, and what goes wrong with the requests to come."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.ranges = True
        self.etag = '"one"'
        self.signed = False
        self.requests: list[str] = []
        self.page = 1000  # keys of a listing
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self) -> None:
        """End the connection at once, which closing one of its several files does not."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        store = self.server
        store.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        path, _, query = self.path.partition("?")
        if store.signed and not is_signed(self.headers, path, query):
            return self.answer(403)
        fault = store.faults.pop(0) if store.faults else ""
        if fault.isdigit():
            return self.answer(int(fault))
        if fault == "reset":
            return self.hang_up()
        if "list-type=2" in query:
            return self.listing(path, dict(urllib.parse.parse_qsl(query)))
        body = store.files.get(urllib.parse.unquote(path))
        if body is None:
            return self.answer(404)
        if self.headers.get("If-Match", store.etag) != store.etag:
            return self.answer(412)
        wanted = self.headers.get("Range")
        if wanted is None or not store.ranges:
            return self.answer(200, body, {"ETag": store.etag})
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        if first >= len(body):
            return self.answer(416)
        part = body[first : last + 1]
        if fault in ("short", "stall"):  # a body that ends early, or goes on never
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            if fault == "stall":
                store.closing.wait(120)
            return self.hang_up()
        place = f"bytes {first}-{first + len(part) - 1}/{len(body)}"
        return self.answer(206, part, {"ETag": store.etag, "Content-Range": place})

    def listing(self, path: str, query: dict[str, str]) -> None:
        bucket, prefix = path.strip("/"), query.get("prefix", "")
        keys = sorted(key.removeprefix(f"/{bucket}/") for key in self.server.files if key.startswith(f"/{bucket}/"))
        found = sorted({
            prefix + rest.partition("/")[0] + ("/" if "/" in rest else "")
            for rest in (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        })  # fmt: skip
        first = int(query.get("continuation-token", "0"))
        page = found[first : first + self.server.page]
        more = first + len(page) < len(found)
        parts = [
            f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"
            if key.endswith("/")
            else f"<Contents><Key>{key.replace('&', '&amp;')}</Key></Contents>"
            for key in page
        ]
        token = f"<NextContinuationToken>{first + len(page)}</NextContinuationToken>" if more else ""
        self.answer(
            200, f"<ListBucketResult><Prefix>{prefix}</Prefix>{''.join(parts)}{token}</ListBucketResult>".encode()
        )


def is_signed(headers: Any, path: str, query: str) -> bool:
    """Compute AWS's signature version 4 as its documentation says, and compare."""
    given = headers.get("Authorization", "")
    if not given.startswith("AWS4-HMAC-SHA256 "):
        return False
    fields = dict(part.strip().split("=", 1) for part in given.removeprefix("AWS4-HMAC-SHA256 ").split(","))
    key, day, region, service, _ = fields["Credential"].split("/")
    names = fields["SignedHeaders"].split(";")
    payload = headers.get("x-amz-content-sha256", hashlib.sha256(b"").hexdigest())
    canonical = "\n".join([
        "GET", path, "&".join(sorted(query.split("&"))) if query else "",
        *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in names), "", fields["SignedHeaders"], payload,
    ])  # fmt: skip
    scope = f"{day}/{region}/{service}/aws4_request"
    text = "\n".join([
        "AWS4-HMAC-SHA256", headers.get("x-amz-date"), scope, hashlib.sha256(canonical.encode()).hexdigest(),
    ])  # fmt: skip
    signing = ("AWS4" + SECRET).encode()
    for part in (day, region, service, "aws4_request"):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    right = hmac.new(signing, text.encode(), hashlib.sha256).hexdigest()
    return (key, region, service) == (KEY, REGION, "s3") and hmac.compare_digest(right, fields["Signature"])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Store()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


ROWS = np.arange(300_000, dtype=np.float32).reshape(-1, 100)


@pytest.fixture
def rows(store: Store, tmp_path: Path) -> str:
    np.save(tmp_path / "x.npy", ROWS)
    store.files["/x.npy"] = (tmp_path / "x.npy").read_bytes()
    return f"{store.url}/x.npy"


def check(dataset: Any) -> None:
    for i in (0, 1, 1234, len(ROWS) - 1):
        assert dataset[i]["array"].tolist() == ROWS[i].tolist()


def test_samples_are_read_by_ranges(store: Store, rows: str) -> None:
    dataset = ox.data.open(rows)
    check(dataset)
    assert all("bytes=" in request for request in store.requests)
    count = len(store.requests)
    check(dataset)
    assert len(store.requests) == count, "what was fetched is kept"
    batches = list(ox.data.Loader(dataset, 500, threads=3))
    assert np.array_equal(np.concatenate([b["array"].numpy() for b in batches]), ROWS)


def test_faults_that_pass_are_tried_again(store: Store, rows: str) -> None:
    store.faults = ["503", "reset", "429", ""]
    dataset = ox.data.open(rows)
    store.faults = ["short", "500", "short"]
    check(dataset)


@pytest.mark.slow
def test_a_body_that_stalls_is_asked_for_again(store: Store, rows: str) -> None:
    dataset = ox.data.open(rows)
    store.faults = ["stall"]
    check(dataset)
    assert not store.faults


def test_faults_that_stay_are_told(store: Store, rows: str) -> None:
    store.faults = ["503"] * 20
    with pytest.raises(OSError, match=r"after 6 tries: status 503, status 503"):
        ox.data.open(rows + "?signature=secret")
    store.faults = []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ox.data.open(f"{store.url}/nowhere.npy")
    store.faults = ["403"] * 6
    with pytest.raises(OSError, match="may not be read"):
        ox.data.open(rows)


def test_no_secrets_in_messages(store: Store, rows: str) -> None:
    store.faults = ["403"] * 6
    with pytest.raises(OSError) as raised:
        ox.data.open(rows.replace("http://", "http://me:hidden@") + "?signature=secret")
    assert "hidden" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_file_that_changes_is_noticed(store: Store, rows: str) -> None:
    dataset = ox.data.open(rows)
    store.etag = '"two"'
    with pytest.raises(OSError, match="has changed since it was opened"):
        check(dataset)
    assert ox.data.open(rows).fingerprint != dataset.fingerprint


def test_a_server_without_ranges(store: Store, rows: str) -> None:
    store.ranges = False
    check(ox.data.open(rows))


def test_http_folders_cannot_be_listed(store: Store) -> None:
    with pytest.raises(NotImplementedError, match="cannot be listed over http"):
        ox.data.open(f"{store.url}/folder/")


@pytest.fixture
def bucket(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store.signed = True
    for i in range(5):
        np.save(tmp_path / "part.npy", ROWS[i * 600 : (i + 1) * 600])
        store.files[f"/bucket/some rows/{i}.npy"] = (tmp_path / "part.npy").read_bytes()
    return "s3://bucket/some rows/"


def test_s3_is_signed_and_listed(store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store.page = 2
    check(ox.data.open(bucket))


def test_s3_credentials_of_a_profile(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = "[default]\naws_access_key_id = WRONG\naws_secret_access_key = wrong\n"
    mine = f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key={SECRET}\n"
    (tmp_path / "credentials").write_text(other + mine)
    with pytest.raises(OSError, match="AWS_ACCESS_KEY_ID"):
        ox.data.open(bucket)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    check(ox.data.open(bucket))


def test_the_remote_tier_of_a_cache(store: Store, rows: str, tmp_path: Path) -> None:
    np.save(tmp_path / "local.npy", ROWS[:50])
    dataset = ox.data.open(tmp_path / "local.npy")
    first = ox.data.Loader(dataset, 10, cache=ox.data.Cache(memory="0", disk="10MB", folder=str(tmp_path / "cache")))
    expected = [batch["array"].clone() for batch in first]
    for path in (tmp_path / "cache").rglob("*.oxe"):
        store.files[f"/kept/{path.relative_to(tmp_path / 'cache')}"] = path.read_bytes()
    damaged = next(name for name in store.files if name.startswith("/kept/"))
    store.files[damaged] = store.files[damaged][:-1] + b"?"
    cache = ox.data.Cache(memory="0", remote=f"{store.url}/kept")
    loader = ox.data.Loader(dataset, 10, cache=cache, prefetch=1)  # so much of the next epoch is begun
    assert all(a.equal(b["array"]) for a, b in zip(expected, loader, strict=True))
    remote = loader.stats()["cache"].remote
    assert 49 <= remote.hits <= 59 and 1 <= remote.damaged <= 2
