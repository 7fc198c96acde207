import pytest

from modelyard.serve.http.site import Cors

PAGE = b"https://app.example"
ASKS = (b"access-control-request-method", b"POST")


def test_any_page_may_read_without_being_known() -> None:
    found = dict(Cors({"*"}).headers([(b"origin", b"https://anywhere.example")]))
    assert found[b"access-control-allow-origin"] == b"*"
    assert b"access-control-allow-credentials" not in found


def test_a_program_gets_no_more_than_before() -> None:
    assert Cors({"*"}).headers([(b"host", b"here")]) == []
    assert Cors({"*"}).preflight("OPTIONS", [ASKS]) is None


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", [(b"origin", PAGE), ASKS]),
        ("OPTIONS", [(b"origin", PAGE)]),
        ("OPTIONS", [(b"origin", b"https://evil.example"), ASKS]),
    ],
    ids=["another method", "no question", "another page"],
)
def test_only_a_browsers_question_is_answered_before_the_token(
    method: str, headers: list[tuple[bytes, bytes]]
) -> None:
    assert Cors({"https://app.example"}).preflight(method, headers) is None


@pytest.mark.parametrize("names", [b"x\r\nset-cookie: a=b", b"a:b", b"", b"a,", b"\xff"])
def test_names_that_are_no_headers_are_not_sent_back(names: bytes) -> None:
    asked = [(b"origin", PAGE), ASKS, (b"access-control-request-headers", names)]
    found = Cors({"https://app.example"}).preflight("OPTIONS", asked)
    assert found is not None
    assert b"access-control-allow-headers" not in dict(found)
