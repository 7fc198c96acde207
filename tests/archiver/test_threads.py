import os

import pytest

from modelyard.base.threads import thread_environment


@pytest.mark.parametrize(("stated", "count"), [("3", "3"), ("", None), ("many", None)])
def test_without_a_number_it_is_that_of_this_process(
    monkeypatch: pytest.MonkeyPatch, stated: str, count: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    expected = count or str(len(os.sched_getaffinity(0)))
    assert thread_environment() == {
        "OMP_NUM_THREADS": expected,
        "MKL_NUM_THREADS": expected,
        "OPENBLAS_NUM_THREADS": expected,
        "GOMP_SPINCOUNT": "0",
    }
    assert thread_environment(7)["OMP_NUM_THREADS"] == "7"
