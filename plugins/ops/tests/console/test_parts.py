"""Sessions, readings and the log's last lines, without a server."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pytest import approx

from modelyard.plugins.ops.console.log import MOST_CHARACTERS, MOST_LINES, LogTail
from modelyard.plugins.ops.console.readings import (
    HISTORY_BYTES,
    MOST_REMEMBERED,
    POINTS,
    RECENT,
    TOTAL,
    WINDOW,
    Percentile,
    Watch,
    percentile,
)
from modelyard.plugins.ops.console.render import Renderer, duration, rate, size
from modelyard.plugins.ops.console.visit import (
    AGE_S,
    FAILURES_S,
    MOST_ADDRESSES,
    MOST_FAILURES,
    MOST_SESSIONS,
    Page,
    Sessions,
    Visit,
    read_form,
)
from modelyard.serve.dataplane.metrics import SECONDS, Metrics, VersionMetrics
from modelyard.serve.errors import BadRequest, Forbidden, TooManyAttempts, Unauthorized
from modelyard.serve.http.tokens import make_grant

TOKEN, OTHER = "t" * 40, "o" * 40


class Time:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def sessions(time: Time) -> Sessions:
    grants = [make_grant("ops", "manage", TOKEN), make_grant("app", "predict", OTHER)]
    return Sessions(lambda: grants, time)


# -- sessions ------------------------------------------------------------------------------------


def test_a_session_ends_with_its_age_used_or_not(sessions: Sessions, time: Time) -> None:
    id = sessions.open(TOKEN, "a")
    time.now += AGE_S - 1
    assert sessions.find(id) is not None
    time.now += 1
    assert sessions.find(id) is None
    time.now -= 2
    assert sessions.find(id) is None  # it is forgotten


def test_the_oldest_session_makes_room(sessions: Sessions) -> None:
    first, second = sessions.open(TOKEN, "a"), sessions.open(TOKEN, "a")
    assert sessions.find(first) is not None  # used more recently than the second now
    for _ in range(MOST_SESSIONS - 1):
        sessions.open(TOKEN, "a")
    assert sessions.find(second) is None and sessions.find(first) is not None


def test_a_session_is_not_kept_as_its_cookie(sessions: Sessions) -> None:
    id = sessions.open(TOKEN, "a")
    assert id not in repr(vars(sessions)) and TOKEN not in repr(vars(sessions))


def test_wrong_tokens_are_not_looked_at_for_ever(sessions: Sessions, time: Time) -> None:
    for _ in range(MOST_FAILURES):
        with pytest.raises(Unauthorized):
            sessions.open("x" * 40, "a")
    for wrong in ("x" * 40, OTHER):
        with pytest.raises(TooManyAttempts) as refused:
            sessions.open(wrong, "a")
        assert refused.value.retry_after_s == FAILURES_S + 1
    with pytest.raises(Unauthorized):
        sessions.open("x" * 40, "b")  # another address is another person
    time.now += FAILURES_S
    with pytest.raises(Unauthorized):
        sessions.open("x" * 40, "a")


def test_a_right_token_passes_whatever_was_wrong_from_its_address(sessions: Sessions) -> None:
    for _ in range(3 * MOST_FAILURES):
        with pytest.raises((Unauthorized, TooManyAttempts)):
            sessions.open("x" * 40, "the proxy")
    assert sessions.find(sessions.open(TOKEN, "the proxy")) is not None


def test_who_is_signed_out_is_told_why(time: Time) -> None:
    grants = [make_grant("ops", "manage", TOKEN)]
    sessions = Sessions(lambda: grants, time)
    old, gone = sessions.open(TOKEN, "a"), sessions.open(TOKEN, "a")
    assert sessions.why_ended("") == ""
    time.now += AGE_S
    assert sessions.find(old) is None and "12 hours" in sessions.why_ended(old)
    new = sessions.open(TOKEN, "a")
    grants.clear()
    assert sessions.find(new) is None and "taken away" in sessions.why_ended(new)
    assert "started anew" in sessions.why_ended("of a server before")
    assert gone  # its reason is looked for when its cookie comes
    for number in range(2 * MOST_SESSIONS):
        grants[:] = [make_grant("ops", "manage", TOKEN)]
        id = sessions.open(TOKEN, str(number))
        grants.clear()
        assert sessions.find(id) is None
    assert len(sessions._ended) == MOST_SESSIONS


def test_addresses_whose_failures_count_are_bounded(sessions: Sessions) -> None:
    for number in range(MOST_ADDRESSES + 5):
        with pytest.raises((Unauthorized, Forbidden)):
            sessions.open(OTHER if number % 2 else "", str(number))
    assert len(sessions._failures) == MOST_ADDRESSES


def test_where_no_token_is_asked_for_everybody_may_act(time: Time) -> None:
    sessions = Sessions(None, time)
    session = sessions.find(sessions.open("", "a"))
    assert session is not None and session.may("manage") and not sessions.asks_for_token


def test_a_token_whose_rights_change_signs_in_anew(time: Time) -> None:
    grants = [make_grant("ops", "manage", TOKEN)]
    sessions = Sessions(lambda: grants, time)
    id = sessions.open(TOKEN, "a")
    grants[:] = [make_grant("ops", "view", TOKEN)]
    assert sessions.find(id) is None


# -- forms and paths -----------------------------------------------------------------------------


def test_a_form_with_files_is_read() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="csrf"\r\n\r\nword\r\n'
        b'--b\r\nContent-Disposition: form-data; name="input"; filename="<i>.png"\r\n'
        b"Content-Type: image/png\r\n\r\n\x89PNG\r\n\r\n--b--\r\n"
    )
    fields, files = read_form(body, b"multipart/form-data; boundary=b")
    assert fields == {"csrf": "word"}
    assert files["input"] == ("<i>.png", b"\x89PNG\r\n")
    for broken in (body[:-10], body[:40], b""):
        with pytest.raises(BadRequest):
            read_form(broken, b"multipart/form-data; boundary=b")
    many = body.replace(b"--b--", b"--b") + b"".join(
        b'Content-Disposition: form-data; name="a%d"\r\n\r\n\r\n--b\r\n' % each
        for each in range(100)
    )
    with pytest.raises(BadRequest, match="more than 100 fields"):
        read_form(many[:-2] + b"--\r\n", b"multipart/form-data; boundary=b")
    with pytest.raises(BadRequest, match="more than 1000 characters"):
        read_form(body.replace(b"<i>", b";" * 1000), b"multipart/form-data; boundary=b")
    named = read_form(body.replace(b"<i>", "π".encode()), b"Multipart/form-data; boundary=b")[1]
    assert named["input"].name == "π.png"


@pytest.mark.parametrize(
    ("path", "root", "home"),
    [
        ("/console", "console", "console"),
        ("/console/", ".", "./../console"),
        ("/console/log", ".", "./../console"),
        ("/console/models/m/1", "../..", "../../../console"),
    ],
)
def test_links_are_relative_to_the_page(path: str, root: str, home: str) -> None:
    visit = Visit("GET", path, {}, {}, {}, "id", None)
    assert (visit.root, visit.home) == (root, home)


def test_a_page_matches_its_own_path_only() -> None:
    async def answer(visit: Visit) -> Any: ...

    page = Page("GET", "/models/{model}/{version}", "view", answer)
    assert page.match("/models/m/1") == {"model": "m", "version": "1"}
    assert page.match("/models/a%2Fb%20c/1") == {"model": "a/b c", "version": "1"}
    for path in ("/models/m", "/models/m/1/x", "/other/m/1", ""):
        assert page.match(path) is None


# -- readings ------------------------------------------------------------------------------------


def buckets(**counts: int) -> list[int]:
    found = [0] * (len(SECONDS) + 1)
    for at, count in counts.items():
        found[int(at[1:])] = count
    return found


def test_a_percentile_lies_in_its_bucket() -> None:
    assert percentile(buckets(), 0.5) is None
    assert percentile(buckets(_0=10), 0.5) == Percentile(SECONDS[0] / 2, 0.0, SECONDS[0])
    found = percentile(buckets(_1=90, _3=10), 0.99)
    assert found is not None and (found.low, found.high) == (SECONDS[2], SECONDS[3])
    assert found.seconds == approx(SECONDS[2] + (SECONDS[3] - SECONDS[2]) * 0.9)
    last = percentile(buckets(_0=1, **{f"_{len(SECONDS)}": 9}), 0.99)
    assert last == Percentile(SECONDS[-1], SECONDS[-1], float("inf"))


class Served:
    """A registry of one version, whose pool does nothing, with real metrics."""

    def __init__(self) -> None:
        metrics = VersionMetrics(Metrics(), "m", "1")
        pool = SimpleNamespace(slots=[SimpleNamespace(worker=None)] * 2, ready_count=2, busy_s=0.0)
        queue = SimpleNamespace(waiting=3)
        self.model = SimpleNamespace(
            name="m", version="1", metrics=metrics, pool=pool, pools=[pool],
            batchers=[queue, queue], explainers=None,
        )  # fmt: skip
        self.predict = metrics.kinds[0]
        self.models = [self.model]

    def __iter__(self) -> Any:
        return iter(self.models)


def test_a_reading_is_the_difference_of_two_seconds() -> None:
    served, key = Served(), ("m", "1")
    watch = Watch(cast("Any", served))

    deque(watch._read(0, 0), 0)
    for second in range(1, 4):
        for _ in range(30):
            served.predict.answered(200, 0.004)
        for _ in range(10):
            served.predict.answered(503, 0.0001)
        served.predict.refused_full.inc(10)
        served.predict.batch_size.observe(4)
        served.model.pool.busy_s += 1.0
        deque(watch._read(second, second), 0)
    assert watch.recent(key)["refused"] == 30 and watch.recent(key)["failed"] == 0
    reading = watch.latest[key]
    assert reading == watch.latest[TOTAL]._replace(at=reading.at)
    assert reading.rate == approx(40) and reading.errors == approx(10)
    assert reading.refused == approx(10) and reading.batch == 4
    assert (reading.queue, reading.ready, reading.workers) == (6, 2, 2)
    assert reading.busy == approx(0.5)
    assert reading.p99 is not None and reading.p99.high == 0.005
    assert reading.p50 is not None and reading.p50.low == 0.0025


def test_an_hour_is_remembered_whether_or_not_somebody_looks_and_no_more() -> None:
    served, key = Served(), ("m", "1")
    watch = Watch(cast("Any", served))
    for second in range(3 * (WINDOW + POINTS * RECENT) // 2):
        served.predict.answered(200, 0.004)
        deque(watch._read(second, second), 0)
        if second == RECENT:  # of what is to come there are no points
            assert len(watch._histories[key].points(is_hour=True)) == RECENT + 1
    history = watch._histories[key]
    assert len(history.points()) == WINDOW and len(history.points(most=3)) == 3
    hour = [row[0] or 0.0 for row in history.points(is_hour=True)]
    assert hour == sorted(hour) and 3580 <= hour[-1] - hour[0] <= 3600
    assert (
        list(history.medians()) == [approx(3.75)] * POINTS and len(watch._seen[key]) == RECENT + 1
    )
    size = history.size + sum(counts.itemsize * len(counts) for _, counts in watch._seen[key])
    assert size < HISTORY_BYTES


def test_what_is_remembered_is_bounded_and_busy_versions_go_before_idle_ones() -> None:
    served = Served()
    watch = Watch(cast("Any", served))
    idle = [SimpleNamespace(**vars(served.model)) for _ in range(MOST_REMEMBERED)]
    for at, each in enumerate(idle):
        each.name, each.metrics = f"idle-{at}", VersionMetrics(Metrics(), f"idle-{at}", "1")
    served.models = [*idle, served.model]
    deque(watch._read(1, 1), 0)
    assert len(watch._histories) == MOST_REMEMBERED and ("m", "1") not in watch._histories
    served.predict.answered(200, 0.004)
    deque(watch._read(2, 2), 0)
    assert {("m", "1"), TOTAL} < watch._histories.keys()
    assert len(watch._histories) == MOST_REMEMBERED
    for second in range(3, 3 + WINDOW):  # more are busy than there is room for: nobody is forgotten
        for each in served.models:
            each.metrics.kinds[0].answered(200, 0.004)
        deque(watch._read(second, second), 0)
    assert len(watch._histories[TOTAL].points()) == WINDOW
    assert sum(len(each.points()) >= WINDOW for each in watch._histories.values()) >= 60
    served.models.clear()
    deque(watch._read(second + 1, second + 1), 0)
    assert set(watch._histories) == set(watch._seen) == set(watch.latest) == {TOTAL}


# -- the log ---------------------------------------------------------------------------------------


def test_the_logs_last_lines_are_bounded() -> None:
    tail = LogTail()
    logger = logging.Logger("modelyard.serve.x")
    logger.addHandler(tail)
    for number in range(MOST_LINES + 10):
        logger.info("line %d", number)
    assert len(tail.lines()) == MOST_LINES and tail.lines()[0].text == "line 10"
    logger.error("%s", "x" * (MOST_CHARACTERS + 5))
    assert tail.lines(logging.ERROR)[0].text == f"{'x' * MOST_CHARACTERS}… (2005 characters)"
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    (line,) = tail.lines(contains="IT FAILED")
    assert line.text == "it failed: ValueError: why" and line.logger == "serve.x"


def test_templates_are_compiled_once_and_not_while_a_page_is_made() -> None:
    renderer = Renderer()

    async def twice() -> None:
        await asyncio.gather(renderer.prepare(), renderer.prepare())

    asyncio.run(twice())
    environment = renderer._environment
    assert environment.cache is not None
    assert len(environment.cache) == len(environment.list_templates()) > 10


def test_numbers_are_written_for_people() -> None:
    written = [duration(each) for each in (None, 0.0004, 0.0123, 1.5, 240.0, float("inf"))]
    assert written == ["–", "400\u202fµs", "12.3\u202fms", "1.5\u202fs", "4\u202fmin",
                       "without end"]  # fmt: skip
    assert [rate(each) for each in (0, 0.25, 12345.6)] == ["0", "0.2", "12\u202f346"]
    assert [size(each) for each in (None, 999, 14_900_000, 3_200_000_000)] == [
        *("–", "999\u202fB", "14.9\u202fMB", "3.2\u202fGB")
    ]
