import pytest

from modelyard.handlers import Context


@pytest.fixture
def context() -> Context:
    context = Context("cat", "/models/cat", {"model": {}}, batch_size=4, gpu=None)
    context.reset(
        ["a", "b"],
        [{"Content-Type": "image/png", "explain": "False"}, {"accept": "image/png"}],
        [{}, {"target": "3"}],
    )
    return context


def test_system_properties_have_torchserves_names() -> None:
    context = Context("cat", "/models/cat", None, batch_size=4, gpu=1)
    assert context.system_properties == {
        "model_dir": "/models/cat",
        "gpu_id": 1,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": True,
    }
    assert context.device == "cuda:1"
    assert context.model_yaml_config == {}


@pytest.mark.parametrize("name", ["Content-Type", "content-type", "CONTENT-TYPE"])
def test_header_is_found_in_any_case(context: Context, name: str) -> None:
    assert context.get_request_header(0, name) == "image/png"


def test_exact_spelling_of_a_header_comes_first() -> None:
    context = Context("cat", "/models/cat", None)
    context.reset(["a"], [{"x-key": "lower", "X-Key": "upper"}])
    assert context.get_request_header(0, "X-Key") == "upper"
    assert context.get_request_header(0, "x-key") == "lower"


def test_absent_header_is_none_and_all_headers_keep_their_spelling(context: Context) -> None:
    assert context.get_request_header(1, "content-type") is None
    assert context.get_all_request_header(0) == {"Content-Type": "image/png", "explain": "False"}


def test_requests_have_ids_and_queries(context: Context) -> None:
    assert context.request_ids == {0: "a", 1: "b"}
    assert (context.get_request_id(), context.get_request_id(1)) == ("a", "b")
    assert context.get_request_id(2) is None
    assert context.query == [{}, {"target": "3"}]


def test_each_answer_has_its_own_status_headers_and_content_type(context: Context) -> None:
    context.set_response_status(404, "no cat", 1)
    context.set_response_content_type(1, "text/plain")
    context.set_response_header(0, "x-cat", "yes")
    assert context.get_response_status(0) == (200, None)
    assert context.get_response_status(1) == (404, "no cat")
    assert context.get_response_content_type(0) is None
    assert context.get_response_headers(1) == {"content-type": "text/plain"}
    assert context.get_response_headers(0) == {"x-cat": "yes"}


def test_status_can_be_set_for_all_answers(context: Context) -> None:
    context.set_all_response_status(503, "later")
    assert [context.get_response_status(index) for index in range(2)] == [(503, "later")] * 2


def test_reset_forgets_the_batch_and_keeps_what_authors_attached(context: Context) -> None:
    context.cache = {"kept": True}  # type: ignore[attr-defined]
    context.set_response_header(0, "x-cat", "yes")
    context.reset(["c"])
    assert context.request_ids == {0: "c"}
    assert context.get_response_headers(0) == {}
    assert context.get_all_request_header(0) == {}
    assert context.query == [{}]
    assert context.cache == {"kept": True}  # type: ignore[attr-defined]


def test_reset_refuses_lists_of_unequal_length(context: Context) -> None:
    with pytest.raises(ValueError, match="2 request ids, 1 headers and 2 queries"):
        context.reset(["a", "b"], [{}])


def test_sequence_id_is_read_from_its_header() -> None:
    context = Context("cat", "/models/cat", None)
    context.reset(["a", "b"], [{"ts_request_sequence_id": "seq-1"}, {}])
    assert (context.get_sequence_id(0), context.get_sequence_id(1)) == ("seq-1", None)
