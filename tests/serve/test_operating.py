"""One server as an operator runs it: TLS, tokens that stay; and the commands that call it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from modelyard.cli import main
from modelyard.serve.http.tokens import make_grant
from tests.serve.live import LiveServer, build_archive, poll, running

HOST = "models.example"
PAGE = "https://app.example:8443"
LIMIT = 100_000
TOKENS = {
    "app": "app-token-of-this-test-0123456789",
    "looker": "looker-token-of-this-test-0123456",
    "graphs": "graphs-token-of-this-test-0123456",
    "admin": "admin-token-of-this-test-01234567",
}
RIGHTS = {"app": "predict", "looker": "explain", "graphs": "metrics", "admin": "manage"}


def write_pair(folder: Path, host: str) -> None:
    """Write a new key and a certificate for a host, as two files that are replaced."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(host)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


@contextmanager
def operating(folder: Path) -> Iterator[LiveServer]:
    """Start a server whose certificate and tokens, and all else that it writes, are in a folder."""
    write_pair(folder, HOST)
    lines = [f"{make_grant(name, RIGHTS[name], token)}\n" for name, token in TOKENS.items()]
    (folder / "tokens.txt").write_text("".join(lines))
    store = folder / "store"
    build_archive(store, "echo")
    build_archive(store, "echo", name="second", version="2.0")
    config = folder / "modelyard.yaml"
    config.write_text(
        f"allowed_hosts: [{HOST}]\nallowed_origins: [{PAGE}]\nmax_request_bytes: {LIMIT}\n"
        "access_log: true\nlog_format: json\n"
    )
    options = [
        f"--config={config}",
        f"--tls-cert={folder / 'cert.pem'}",
        f"--tls-key={folder / 'key.pem'}",
        f"--token-file={folder / 'tokens.txt'}",
    ]
    with running(folder / "state", store, "--workers=1", "--models=echo", *options) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operating")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with operating(folder) as server:
        yield server


def client(server: LiveServer, api: str, folder: Path, token: str | None = None) -> httpx.Client:
    """Return a client that checks the certificate for the server's name."""
    trust = ssl.create_default_context(cafile=folder / "cert.pem")
    headers = {"Authorization": f"Bearer {TOKENS[token]}"} if token else {}
    port = server.about[api].rpartition(":")[2]
    return httpx.Client(
        base_url=f"https://127.0.0.1:{port}",
        headers={**headers, "Host": f"{HOST}:{port}"},
        verify=trust,
        timeout=20,
    )


def ask(
    server: LiveServer, api: str, folder: Path, token: str | None, method: str, path: str,
    content: bytes = b"x", **headers: Any,
) -> httpx.Response:  # fmt: skip
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    with client(server, api, folder, token) as asking:
        return asking.request(
            method, path, content=content, headers=sent, extensions={"sni_hostname": HOST}
        )


# -- tokens and TLS ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "request_", "takes"),
    [
        ("inference", ("POST", "/predictions/echo"), ["app"]),
        ("inference", ("POST", "/explanations/echo"), ["looker"]),
        ("inference", ("GET", "/v2/models/echo"), [*TOKENS]),
        ("inference", ("GET", "/ping"), [None, *TOKENS]),
        ("management", ("GET", "/models"), ["admin"]),
        ("metrics", ("GET", "/metrics"), ["graphs"]),
    ],
)
def test_each_token_opens_what_it_has_the_right_for(
    server: LiveServer, folder: Path, api: str, request_: tuple[str, str], takes: list[str | None]
) -> None:
    for token in (None, *TOKENS):
        answer = ask(server, api, folder, token, *request_)
        expected = 200 if token in takes else 401 if token is None else 403
        assert answer.status_code == expected, (token, answer.text)


def test_a_handler_sees_no_token(server: LiveServer, folder: Path) -> None:
    answer = ask(server, "inference", folder, "app", "POST", "/predictions/echo")
    assert "Host" in answer.json()["headers"]
    assert TOKENS["app"] not in answer.text and "uthorization" not in answer.text


def test_a_client_without_tls_gets_nothing(server: LiveServer) -> None:
    plain = server.about["inference"].replace("https", "http")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{plain}/ping")


def test_a_certificate_that_is_replaced_is_shown_without_a_restart(
    server: LiveServer, folder: Path
) -> None:
    before = {name: (folder / name).read_bytes() for name in ("cert.pem", "key.pem")}
    port = int(server.about["management"].rpartition(":")[2])

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    write_pair(folder, "other.example")
    new_key = (folder / "key.pem").read_bytes()
    (folder / "key.pem").write_bytes(before["key.pem"])
    poll(lambda: "cannot be used" in server.log if shown() else False, "half of a pair is refused")
    assert shown().encode() == before["cert.pem"]
    (folder / "key.pem").write_bytes(new_key)
    poll(lambda: shown().encode() != before["cert.pem"], "the new certificate is shown")
    for name, content in before.items():
        (folder / name).write_bytes(content)
    poll(lambda: shown().encode() == before["cert.pem"], "the old one is shown again")


# -- pages of elsewhere ------------------------------------------------------------------------

CALLS = {
    "inference": ("POST", "/predictions/echo", "app"),
    "management": ("GET", "/models", "admin"),
    "metrics": ("GET", "/metrics", "graphs"),
}


@pytest.mark.parametrize("api", CALLS)
def test_a_page_that_is_named_may_call_every_api_and_read_what_it_answers(
    server: LiveServer, folder: Path, api: str
) -> None:
    method, path, token = CALLS[api]
    asked: dict[str, Any] = {"access_control_request_method": method, "origin": PAGE}
    asked["access_control_request_headers"] = "authorization, content-type"
    allowed = ask(server, api, folder, None, "OPTIONS", path, **asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-headers"] == "authorization, content-type"
    assert method in allowed.headers["access-control-allow-methods"]
    right = ask(server, api, folder, token, method, path, origin=PAGE, sec_fetch_site="cross-site")
    wrong = ask(server, api, folder, None, method, path, origin=PAGE)
    absent = ask(server, api, folder, token, method, "/nowhere", origin=PAGE)
    too_large = ask(server, api, folder, token, method, path, bytes(LIMIT + 1), origin=PAGE)
    answers = (allowed, right, wrong, absent, too_large)
    assert [answer.status_code for answer in answers[1:]] == [200, 401, 404, 413]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("api", CALLS)
@pytest.mark.parametrize(
    "origin", ["https://app.example", "http://app.example:8443", "https://evil.example", "null"]
)
def test_a_page_that_is_not_named_may_neither_call_nor_read(
    server: LiveServer, folder: Path, api: str, origin: str
) -> None:
    method, path, token = CALLS[api]
    asked: dict[str, Any] = {"access_control_request_method": method}
    for answer in (
        ask(server, api, folder, None, "OPTIONS", path, origin=origin, **asked),
        ask(server, api, folder, token, method, path, origin=origin),
    ):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


# -- logs --------------------------------------------------------------------------------------

TRACE = "0af7651916cd43dd8448eb211c80319c"


def lines_of(server: LiveServer, log: str) -> list[dict[str, Any]]:
    text = (server.state_dir / "logs" / log).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_each_request_has_a_line_with_its_id_and_nothing_that_it_brought(
    server: LiveServer, folder: Path
) -> None:
    ask(server, "inference", folder, "app", "POST", "/predictions/echo?q=secret-1", b"secret-2",
        x_request_id="of-the-log", traceparent=f"00-{TRACE}-b7ad6b7169203331-00")  # fmt: skip
    ask(server, "management", folder, "app", "GET", '/"x\u00e4', x_request_id="odd-path")
    ask(server, "inference", folder, "app", "POST", "/predictions/echo", bytes(LIMIT + 1),
        x_request_id="too-large")  # fmt: skip

    def found() -> dict[str, dict[str, Any]] | None:
        lines = {line["http.request.id"]: line for line in lines_of(server, "access.log")}
        wanted = ("of-the-log", "odd-path", "too-large")
        return lines if all(id in lines for id in wanted) else None

    lines: dict[str, dict[str, Any]] = poll(found, "the lines are written")
    line = lines["of-the-log"]
    assert line["event.duration"] > 0
    assert line["http.response.body.bytes"] > 100
    assert {key: line[key] for key in line if key.startswith(("http.r", "url", "labels", "trace"))
            and "bytes" not in key} == {
        "http.request.id": "of-the-log", "http.request.method": "POST",
        "url.path": "/predictions/echo", "http.response.status_code": 200,
        "labels.model": "echo", "labels.version": "1.0", "trace.id": TRACE,
    }  # fmt: skip
    assert lines["odd-path"]["http.response.status_code"] == 403
    assert lines["odd-path"]["url.path"] == "/%22x%C3%A4"
    assert lines["too-large"]["http.response.status_code"] == 413
    text = (server.state_dir / "logs" / "access.log").read_text()
    assert "secret" not in text and not any(token in text for token in TOKENS.values())


def test_the_servers_log_is_json_too_and_says_where_it_is(server: LiveServer) -> None:
    (ready,) = [
        line for line in lines_of(server, "server.log") if line["message"].startswith("ready,")
    ]
    assert server.about["inference"] in ready["message"]
    assert ready["message"].endswith("; echo 1.0")
    assert (ready["log.level"], ready["process.pid"]) == ("info", server.pid)


# -- commands ----------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments)])
        said = capfd.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


def test_commands_find_and_trust_the_server_of_their_state_folder(
    server: LiveServer, folder: Path, run: Run
) -> None:
    where = f"--state-dir={server.state_dir}"
    code, out, err = run("predict", "echo", folder / "modelyard.yaml", where)
    assert (code, json.loads(out)["version"]) == (0, "1.0"), err
    code, out, _ = run("serve", "status", where)
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80 and line[:4] != "log "] == []
    assert "echo   1.0*         1/1    0/100         0" in out


def test_a_url_is_called_with_a_token_and_who_is_trusted(
    server: LiveServer, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.about["management"].replace("127.0.0.1", "localhost")
    code, _, err = run("models", "list", "--url", url)
    assert code == 1 and "is not trusted: self-signed certificate; --ca FILE names" in err
    code, _, err = run("models", "list", "--url", url, "--ca", folder / "cert.pem")
    assert code == 1 and "certificate is not valid for 'localhost'" in err
    code, _, err = run("models", "list", "--url", url, "--ca", folder / "tokens.txt")
    assert code == 1 and "cannot use the certificates in" in err
    code, _, err = run("models", "list", "--url", "localhost:8081")
    assert code == 2 and "localhost:8081 is not a URL; expected http://HOST:PORT or" in err
    code, _, err = run("models", "list", "--url", "http://localhost:port")
    assert code == 1 and "http://localhost:port is not a URL" in err


def test_models_are_managed_by_commands(server: LiveServer, run: Run) -> None:
    where = f"--state-dir={server.state_dir}"
    assert run("models", "register", "second.mar", "--name=echo", "--workers=0", where)[0] == 0
    code, out, _ = run("models", "list", where, "--json")
    versions = [(each["modelVersion"], each["isDefault"]) for each in json.loads(out)]
    assert (code, versions) == (0, [("1.0", True), ("2.0", False)])
    code, out, _ = run("models", "default", "echo/2.0", where)
    assert (code, out) == (0, 'Default version successfully updated for model "echo" to "2.0"\n')
    code, out, _ = run("models", "list", where)
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [
        ["echo", "1.0", "1/1"],
        ["echo", "2.0*", "0/0"],
    ]
    assert out.endswith("* answers where no version is named\n")
    assert run("models", "default", "echo/1.0", where)[0] == 0
    code, out, _ = run("models", "scale", "echo/2.0", "1", where)
    assert (code, out) == (0, "Workers scaled to 1 for model: echo, version: 2.0\n")
    code, out, _ = run("models", "describe", "echo/2.0", where)
    assert code == 0 and "modelVersion          2.0" in out and "ready" in out
    assert run("models", "unregister", "echo/2.0", where)[0] == 0
    for arguments, message in (
        (("default", "echo"), '"echo" names no version; expected NAME/VERSION'),
        (("describe", "cats"), "404 ModelNotFoundException: Model not found: cats"),
        (("register", "cats.mar"), "404 ModelNotFoundException: Model not found at: cats.mar"),
        (("unregister", "echo/3"), "404 ModelVersionNotFoundException: "),
    ):
        code, out, err = run("models", *arguments, where)
        assert (code, out) == (1, "") and message in err
        assert err.count("\n") == 1
