"""Names and web pages: who may call a server, by what a browser says of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.serve.errors import Forbidden, StartError
from modelyard.serve.http.site import KNOWN, SiteCheck
from modelyard.serve.settings import Address, Settings, load_settings

LOOPBACK = Address("127.0.0.1", 8080)
OPEN = Address("0.0.0.0", 8080)


def passes(check: SiteCheck, method: str = "POST", **fields: str) -> bool:
    """Return whether a request with these headers passes; `sec_fetch_site` is Sec-Fetch-Site."""
    headers = {name.replace("_", "-").encode(): value.encode() for name, value in fields.items()}
    try:
        check(method, headers)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LocalHost:1", "localhost.", "api.localhost:8080"),
        *("127.0.0.1", "127.0.0.1:9", "127.8.8.8:80", "[::1]", "[::1]:8080", ""),
    ],
)
def test_a_server_on_loopback_has_the_names_of_loopback(host: str) -> None:
    assert passes(SiteCheck(LOOPBACK), host=host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "notlocalhost", "x"),
        *("127.0.0.1.evil.example", "0.0.0.0:8080", "192.168.0.9", "[::]", "[fe80::1]", "8080"),
    ],
)
def test_a_server_on_loopback_has_no_other_name(host: str) -> None:
    assert not passes(SiteCheck(LOOPBACK), host=host)


def test_a_request_without_a_host_passes() -> None:
    assert passes(SiteCheck(LOOPBACK))  # HTTP/1.0, which no browser speaks


def test_the_setting_names_more_hosts_and_their_pages() -> None:
    check = SiteCheck(LOOPBACK, ["ml.example"])
    assert passes(check, host="ml.example:8080")
    assert passes(check, host="127.0.0.1:8080", origin="https://ml.example")
    assert not passes(check, host="127.0.0.1:8080", origin="https://ml.example.evil")
    assert not passes(check, host="other.example")
    every = SiteCheck(LOOPBACK, ["*"])
    assert passes(every, host="evil.example", origin="http://other.example")


def test_the_host_that_was_given_is_a_name() -> None:
    assert passes(SiteCheck(Address("Localhost", 1)), host="localhost:1")
    check = SiteCheck(Address("box.example", 1), ["ml.example"])
    assert passes(check, host="box.example:1")
    assert not passes(check, host="evil.example:1")


def test_a_server_that_others_reach_has_any_name_until_its_names_are_given() -> None:
    assert passes(SiteCheck(OPEN), host="any.example")
    named = SiteCheck(OPEN, ["ml.example"])
    assert passes(named, host="ml.example")
    assert passes(named, host="10.1.2.3:8080")  # as a balancer's probe
    assert not passes(named, host="any.example")


def test_a_unix_socket_has_any_name() -> None:
    assert passes(SiteCheck(Address(path=Path("/run/x"))), host="whatever")


@pytest.mark.parametrize("address", [LOOPBACK, OPEN])
@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://127.0.0.1:3000", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        ("http://", False),
        ("http://127.0.0.1:8080.evil.example", False),
    ],
)
def test_only_its_own_pages_may_call(address: Address, origin: str, expected: bool) -> None:
    check = SiteCheck(address)
    assert passes(check, host="127.0.0.1:8080", origin=origin) is expected
    assert passes(check, "OPTIONS", host="127.0.0.1:8080", origin=origin) is expected


def test_a_page_of_elsewhere_is_refused_without_an_origin_too() -> None:
    check = SiteCheck(LOOPBACK)
    host = "127.0.0.1:8080"
    assert not passes(check, "GET", host=host, sec_fetch_site="cross-site")
    image = {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}
    assert not passes(check, "GET", host=host, sec_fetch_site="cross-site", **image)
    framed = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}
    assert not passes(check, "GET", host=host, sec_fetch_site="cross-site", **framed)
    assert passes(check, "GET", host=host, sec_fetch_site="none")
    assert passes(check, "GET", host=host, sec_fetch_site="same-origin")


def test_a_link_to_the_docs_can_be_followed_and_posts_nothing() -> None:
    check = SiteCheck(LOOPBACK)
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    link |= {"sec_fetch_dest": "document", "host": "localhost"}
    assert passes(check, "GET", **link)
    assert not passes(check, "POST", **link)


def test_its_own_page_behind_a_proxy_that_changes_the_host_may_call() -> None:
    # Scripts cannot set Sec-Fetch-Site: the browser compared what the reader sees.
    own = {"origin": "https://ml.example", "sec_fetch_site": "same-origin"}
    assert passes(SiteCheck(LOOPBACK), host="127.0.0.1:8080", **own)
    assert not passes(SiteCheck(LOOPBACK), host="evil.example", **own)


def test_origins_that_cors_allows_may_call() -> None:
    check = SiteCheck(LOOPBACK, (), ["https://App.example"])
    page = {"host": "localhost", "sec_fetch_site": "cross-site"}
    assert passes(check, origin="https://app.example", **page)
    assert not passes(check, origin="http://app.example", **page)
    assert passes(SiteCheck(LOOPBACK, (), ["*"]), origin="https://any.example", **page)
    assert not passes(SiteCheck(LOOPBACK, (), ["*"]), host="evil.example")


def test_the_message_says_what_came_and_which_setting_helps() -> None:
    with pytest.raises(Forbidden, match=r"not called 'evil\.example'; .* allowed_hosts"):
        SiteCheck(LOOPBACK)("GET", {b"host": b"evil.example"})
    with pytest.raises(Forbidden, match=r"page of '\\x1bhttp' .* allowed_hosts"):
        SiteCheck(LOOPBACK)("GET", {b"host": b"localhost", b"origin": b"\x1bhttp"})


def test_names_that_passed_are_kept_up_to_a_number() -> None:
    check = SiteCheck(LOOPBACK)
    for port in range(2 * KNOWN):
        assert passes(check, host=f"localhost:{port}")
    assert len(check.known) == KNOWN


@pytest.mark.parametrize("name", ["https://a.example", "a.example:80", "a/b", ""])
def test_what_is_not_the_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(StartError, match=r"allowed-hosts\.0: expected .*leave out scheme and port"):
        load_settings({"allowed_hosts": [name]}, None, {})


def test_names_of_hosts_are_read_from_the_environment() -> None:
    settings = load_settings({}, None, {"MODELYARD_ALLOWED_HOSTS": "A.example,[::2]"})
    assert settings.allowed_hosts == ("a.example", "::2")


def test_no_tokens_are_warned_of_and_have_to_be_meant_where_others_reach_the_server() -> None:
    assert load_settings({}, None, {}).warnings == []
    (warning,) = load_settings({"auth": "never"}, None, {}).warnings
    assert "every user of this machine" in warning
    everywhere = {"auth": "never", "host": "0.0.0.0"}
    with pytest.raises(StartError, match=r"everybody who reaches 0\.0\.0\.0 .*--insecure"):
        load_settings(everywhere, None, {})
    meant: Settings = load_settings({**everywhere, "insecure": True}, None, {})
    assert "everybody who reaches it" in meant.warnings[0]


def test_any_page_may_probe_under_a_name_of_ours() -> None:
    check = SiteCheck(LOOPBACK)
    page = {b"origin": b"https://other.example", b"sec-fetch-site": b"cross-site"}
    check("GET", {b"host": b"localhost", **page}, "/ping")
    for method, host, path in (
        ("POST", b"localhost", "/ping"), ("GET", b"evil.example", "/ping"),
        ("GET", b"localhost", "/predictions/ping"),
    ):  # fmt: skip
        with pytest.raises(Forbidden):
            check(method, {b"host": host, **page}, path)
