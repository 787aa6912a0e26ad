"""Files behind URLs: a server that answers as servers do on bad days, and one that checks signatures of S3."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
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
        self.lock = threading.Lock()
        self.services: dict[str, tuple[dict[str, str], str]] = {}  # headers that must come, and the answer
        self.tokens: set[str | None] = set()  # of the sessions that signed
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

    def fault(self) -> str | None:
        """What is wrong with the body of this request; None where it is answered already."""
        path, _, query = self.path.partition("?")
        if (service := self.server.services.get(f"{self.command} {self.path}")) is not None:
            right = all(self.headers.get(name) == value for name, value in service[0].items())
            self.answer(200 if right else 401, service[1].encode())
            return None
        self.server.tokens.add(self.headers.get("x-amz-security-token"))
        if self.server.signed and not is_signed(self.command, self.headers, path, query):
            self.answer(403)
            return None
        with self.server.lock:
            fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self.answer(int(fault))
        elif fault == "reset":
            self.hang_up()
        else:
            return fault
        return None

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        name = urllib.parse.unquote(self.path)
        self.server.requests.append(f"PUT {self.path}")
        if self.fault() is None:
            return
        given = self.headers.get("x-amz-checksum-crc32c")
        if given is not None and base64.b64decode(given) != crc32c(body).to_bytes(4, "big"):
            return self.answer(400)
        self.server.files[name] = body
        self.answer(200 if self.server.signed else 201)

    def do_DELETE(self) -> None:
        self.server.requests.append(f"DELETE {self.path}")
        if self.fault() is None:
            return
        self.answer(204 if self.server.files.pop(urllib.parse.unquote(self.path), None) is not None else 404)

    def do_GET(self) -> None:
        store = self.server
        store.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        path, _, query = self.path.partition("?")
        fault = self.fault()
        if fault is None:
            return
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


def crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def is_signed(method: str, headers: Any, path: str, query: str) -> bool:
    """Compute AWS's signature version 4 as its documentation says, and compare."""
    given = headers.get("Authorization", "")
    if not given.startswith("AWS4-HMAC-SHA256 "):
        return False
    fields = dict(part.strip().split("=", 1) for part in given.removeprefix("AWS4-HMAC-SHA256 ").split(","))
    key, day, region, service, _ = fields["Credential"].split("/")
    names = fields["SignedHeaders"].split(";")
    payload = headers.get("x-amz-content-sha256", hashlib.sha256(b"").hexdigest())
    canonical = "\n".join([
        method, path, "&".join(sorted(query.split("&"))) if query else "",
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
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
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


def temporary(seconds: int = 3600) -> dict[str, str]:
    ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    return {
        "AccessKeyId": KEY,
        "SecretAccessKey": SECRET,
        "Token": "session",
        "Expiration": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
    }


def test_s3_credentials_of_a_machine(store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = "/latest/meta-data/iam/security-credentials/"
    store.services = {
        "PUT /latest/api/token": ({"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, "the token"),
        f"GET {roles}": ({"X-aws-ec2-metadata-token": "the token"}, "trainer"),
        f"GET {roles}trainer": ({"X-aws-ec2-metadata-token": "the token"}, json.dumps(temporary())),
    }
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", store.url + "/")
    check(ox.data.open(bucket))
    assert store.tokens == {"session"}
    assert sum("/latest/" in request for request in store.requests) == 3  # once for all requests


def test_s3_credentials_of_a_container(
    store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the pod\n")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{store.url}/v1/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    # They end so soon that each request asks for new ones after ten seconds.
    store.services = {"GET /v1/credentials": ({"Authorization": "of the pod"}, json.dumps(temporary(60)))}
    check(ox.data.open(bucket))
    assert store.tokens == {"session"}


def test_s3_credentials_of_a_web_identity(
    store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("ey+/J0=")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", store.url)
    query = urllib.parse.urlencode({
        "Action": "AssumeRoleWithWebIdentity", "Version": "2011-06-15",
        "RoleArn": "arn:aws:iam::123456789012:role/trainer", "RoleSessionName": "oxytorch",
        "WebIdentityToken": "ey+/J0=",
    })  # fmt: skip
    given = temporary()
    given["SessionToken"] = given.pop("Token")
    inside = "".join(f"<{tag}>{value}</{tag}>" for tag, value in given.items())
    store.services = {
        f"GET /?{query}": ({}, f"<AssumeRoleWithWebIdentityResponse><Credentials>{inside}</Credentials></AssumeRoleWithWebIdentityResponse>")  # noqa: E501
    }  # fmt: skip
    check(ox.data.open(bucket))
    assert store.tokens == {"session"}


@pytest.mark.parametrize("answer", ["", "{}", "not JSON", '{"AccessKeyId": 3}', '{"AccessKeyId": "A"}', "[1]"])
def test_a_service_without_credentials(store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{store.url}/{len(answer)}")
    store.services = {f"GET /{len(answer)}": ({}, answer)}
    with pytest.raises(OSError, match="role of the container or machine"):
        ox.data.open(bucket)


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


def written(store: Store, prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(prefix): body for name, body in store.files.items() if name.startswith(prefix)}


@pytest.mark.parametrize("compress", [False, True])
def test_a_dataset_is_written_behind_a_url(store: Store, tmp_path: Path, compress: bool) -> None:
    np.save(tmp_path / "x.npy", ROWS[:500])
    store.faults = ["", "", "500", "reset", "", "503"]
    made = ox.data.convert(tmp_path / "x.npy", f"{store.url}/out%20dir/", shard_size=40_000, compress=compress)
    assert not store.faults
    assert (made.format, made.samples, made.resumed) == ("mds", 500, 0)
    alike = ox.data.convert(tmp_path / "x.npy", tmp_path / "local", shard_size=40_000, compress=compress)
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert written(store, "/out dir/") == local
    assert made.bytes == alike.bytes
    assert len(local) > 4
    dataset = ox.data.open(f"{store.url}/out%20dir/")
    assert [dataset[i]["array"].tolist() for i in (0, 321, 499)] == ROWS[[0, 321, 499]].tolist()
    with pytest.raises(ValueError, match="holds an MDS dataset already"):
        ox.data.convert(tmp_path / "x.npy", f"{store.url}/out%20dir", shard_size=40_000, compress=compress)


def test_an_upload_that_was_interrupted_goes_on(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", ROWS[:500])
    target = f"{store.url}/out"

    def stop(done: int) -> None:
        if done >= 320:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        ox.data.convert(tmp_path / "x.npy", target, shard_size=10_000, progress=stop)
    assert "/index.json" not in written(store, "/out")
    assert "/convert.json" in written(store, "/out")
    made = ox.data.convert(tmp_path / "x.npy", target, shard_size=10_000)
    assert 0 < made.resumed < 320
    assert "/convert.json" not in written(store, "/out")
    dataset = ox.data.open(target + "/")
    assert all(np.array_equal(dataset[i]["array"].numpy(), ROWS[i]) for i in range(500))


def test_an_upload_that_is_refused_is_told(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", ROWS[:10])
    store.faults = ["", "", "405"]
    with pytest.raises(OSError, match=r"shard\.00000\.mds cannot be written: the server answers with status 405"):
        ox.data.convert(tmp_path / "x.npy", f"{store.url}/out")
    store.faults = ["", "", *["503"] * 6]
    with pytest.raises(OSError, match="cannot be written after 6 tries: status 503"):
        ox.data.convert(tmp_path / "x.npy", f"{store.url}/out")
    assert not written(store, "/out")
    np.save(tmp_path / "tokens.npy", np.arange(100).reshape(10, 10))
    with pytest.raises(NotImplementedError, match="give a local path"):
        ox.data.convert(tmp_path / "tokens.npy", f"{store.url}/out", format="megatron")


def test_uploads_to_s3_are_signed(store: Store, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", ROWS[:50])
    target = "s3://bucket/made & stored"
    with pytest.raises(OSError, match="may not be written"):
        ox.data.convert(tmp_path / "x.npy", target)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    ox.data.convert(tmp_path / "x.npy", target)
    assert set(written(store, "/bucket/made & stored/")) == {"shard.00000.mds", "index.json"}
    dataset = ox.data.open(target + "/")
    assert dataset[49]["array"].tolist() == ROWS[49].tolist()
