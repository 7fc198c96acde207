import itertools
import json
import os
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.control import sizing
from modelyard.serve.control.sizing import (
    Machine,
    ResourceRequest,
    choose,
    count_gpus,
    cpu_quota,
    describe_excess,
)
from modelyard.serve.errors import Conflict
from modelyard.serve.explain_plan import plan_start
from modelyard.serve.settings import Settings
from tests.serve.live import build_archive, modelyard, running, start_arguments

CPU = ResourceRequest("cpu")


def said(workers: int | None = None, threads: int = 0, device: str = "cpu") -> ResourceRequest:
    return ResourceRequest(device, workers, "said", threads, "said")


def pairs(machine: Machine, *requests: ResourceRequest, taken: int = 0) -> list[tuple[int, int]]:
    """Return workers and threads of each."""
    return [
        (allocation.workers, allocation.threads) for allocation in choose(machine, requests, taken)
    ]


def test_two_cores_never_get_a_team_of_two_threads() -> None:
    """Such a team answered 71 requests a second where one thread answered 1256."""
    two = Machine(2, 0)
    assert pairs(two, CPU) == [(2, 1)]
    for models in range(1, 9):
        assert all(threads == 1 for _, threads in pairs(two, *[CPU] * models))


def test_nothing_said_makes_no_more_threads_than_cores() -> None:
    for cores, models, gpus in itertools.product(range(1, 65), range(1, 9), (0, 1, 4)):
        machine = Machine(cores, gpus)
        allocations = choose(machine, [CPU] * models)
        assert all(
            allocation.threads == 1 and allocation.workers >= 1 for allocation in allocations
        )
        assert sum(allocation.total_threads for allocation in allocations) <= max(cores, models)
        assert len({allocation.workers for allocation in allocations}) == 1
        assert describe_excess(machine, allocations) is None


def test_what_others_say_leaves_the_rest_no_more_than_the_cores_that_are_left() -> None:
    random_ = random.Random(29)
    for cores, models in itertools.product(range(1, 65), range(1, 9)):
        machine = Machine(cores, random_.choice((0, 0, 2)))
        requests = [
            said(
                random_.choice((None, None, 0, 1, 2, 7)),
                random_.choice((0, 0, 1, 2, 5)),
                random_.choice(("cpu", "auto", "cuda:1")),
            )
            for _ in range(models)
        ]
        taken = random_.choice((0, 0, 3))
        allocations = choose(machine, requests, taken)
        on_gpu = [machine.gpus > 0 and each.device != "cpu" for each in requests]
        open_ = [
            each.workers is None and not gpu for each, gpu in zip(requests, on_gpu, strict=True)
        ]
        fixed = taken + sum(
            allocation.total_threads
            for allocation, is_open in zip(allocations, open_, strict=True)
            if not is_open
        )
        rest = sum(
            allocation.total_threads
            for allocation, is_open in zip(allocations, open_, strict=True)
            if is_open
        )
        # Never more than what is left, but for the one worker that every model has at least.
        least = sum(
            each.threads or 1 for each, is_open in zip(requests, open_, strict=True) if is_open
        )
        assert rest <= max(cores - fixed, least)
        for request, allocation, gpu in zip(requests, allocations, on_gpu, strict=True):
            assert allocation.threads == (request.threads or 1)
            if request.workers is not None:
                assert allocation.workers == request.workers
            elif gpu:
                assert allocation.workers == (1 if request.device == "cuda:1" else machine.gpus)
            else:
                assert allocation.workers >= 1


@pytest.mark.parametrize(
    ("machine", "requests", "expected"),
    [
        pytest.param(Machine(8, 0), [said(3), CPU, CPU], [(3, 1), (2, 1), (2, 1)], id="minWorkers"),
        pytest.param(Machine(8, 0), [said(None, 4)], [(2, 4)], id="teams as wished"),
        pytest.param(Machine(2, 0), [said(None, 4)], [(1, 4)], id="a team over the cores"),
        pytest.param(Machine(2, 0), [said(5), CPU], [(5, 1), (1, 1)], id="all taken"),
        pytest.param(Machine(8, 0), [said(0), CPU], [(0, 1), (8, 1)], id="none wanted"),
        pytest.param(Machine(16, 4), [said(device="auto")], [(4, 1)], id="one per device"),
        pytest.param(Machine(16, 4), [said(device="cuda:2")], [(1, 1)], id="one device"),
        pytest.param(Machine(16, 0), [said(device="cuda")], [(16, 1)], id="no device there"),
        pytest.param(
            Machine(16, 4), [said(device="cuda"), CPU], [(4, 1), (12, 1)], id="beside CUDA"
        ),
    ],
)
def test_what_is_said_stands_and_the_rest_is_shared(
    machine: Machine, requests: list[ResourceRequest], expected: list[tuple[int, int]]
) -> None:
    assert pairs(machine, *requests) == expected


def test_a_model_that_comes_later_gets_what_is_left() -> None:
    assert pairs(Machine(8, 0), CPU, taken=6) == [(2, 1)]
    assert pairs(Machine(8, 0), CPU, taken=8) == [(1, 1)]


def test_more_threads_than_cores_are_warned_of_where_somebody_said_so() -> None:
    two = Machine(2, 0)
    warning = describe_excess(two, choose(two, [said(2, 2)]))
    assert warning is not None and warning.startswith("4 threads of workers on 2 cores")
    assert describe_excess(two, choose(two, [said(2)])) is None
    assert describe_excess(two, choose(two, [CPU] * 5)) is None
    assert describe_excess(two, choose(two, [said(1)]), taken=2) is not None


def test_every_size_says_why() -> None:
    reasons = {
        allocation.why_workers
        for machine in (Machine(2, 0), Machine(8, 2))
        for allocation in choose(machine, [CPU, CPU, CPU, said(2), said(device="cuda")])
    }
    assert reasons == {
        "each model has at least one; 0 cores left for 4 models",
        "4 cores left for 3 models",
        "said",
        "one for each of 2 CUDA devices",
    }


# -- the machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/elsewhere\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        (
            "2:cpu,cpuacct:/x\n1:memory:/y\n0::/\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000", "cpu,cpuacct/x/cpu.cfs_period_us": "1e5"},
            None,
        ),
        (
            "2:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "1"}, None),
        ("0::/a\n", {"unified/a/cpu.max": "100000 100000"}, 1.0),
    ],
)
def test_the_least_quota_of_the_control_groups_counts(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == quota


def test_a_quota_below_the_mask_decides_and_is_rounded_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    for quota, cores in ((2.5, 2), (0.5, 1), (8.0, 4), (None, 4)):
        monkeypatch.setattr(sizing, "cpu_quota", lambda quota=quota: quota)
        machine = sizing.this_machine()
        assert machine.cores == cores
        assert machine.has_quota == (quota is not None and quota < 4)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2,3", 3)])
def test_gpus_are_counted_as_a_worker_sees_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


# -- the plan ----------------------------------------------------------------------------------

CORES = len(os.sched_getaffinity(0))


def explained(*arguments: str | Path) -> dict[str, Any]:
    ran = modelyard("serve", "start", *arguments, "--explain-plan", "--json")
    assert ran.returncode == 0, ran.stderr
    plan: dict[str, Any] = json.loads(ran.stdout)
    return plan


def test_the_plan_is_what_the_start_starts_and_starts_nothing_itself(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    build_archive(store, "echo", name="some", config="minWorkers: 1\nworkerThreads: 2\n")
    build_archive(store, "echo", name="other", config="batchSize: 3\njobQueueSize: 5\n")
    folders = (f"--model-store={store}", f"--state-dir={state}", "--device=cpu")
    plan = explained("--models=ALL", *folders)
    assert not state.exists()
    other, some = plan["models"]
    assert (some["workers"], some["threads"]) == (
        {"value": 1, "why": "minWorkers of model-config.yaml"},
        {"value": 2, "why": "workerThreads of model-config.yaml"},
    )
    assert other["workers"]["value"] == max(1, CORES - 2)
    assert other["batch_size"] == {"value": 3, "why": "batchSize of model-config.yaml"}
    assert other["queue_size"]["value"] == 5
    with running(state, store, "--models=ALL") as server:
        assert server.about["warnings"] == plan["warnings"]
        for model in plan["models"]:
            pids = server.worker_pids(model["name"])
            assert len(pids) == model["workers"]["value"]
            variables = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
            assert f"OMP_NUM_THREADS={model['threads']['value']}".encode() in variables
        # With nothing named it is what was served last; a running server does not matter.
        again = explained(*folders)
        assert {m["name"]: m["workers"]["value"] for m in again["models"]} == {
            m["name"]: m["workers"]["value"] for m in plan["models"]
        }
        # One that comes later gets what is left, which is nothing: one worker.
        assert server.register("other", model_name="late").status_code == 200
        left = max(1, CORES - plan["threads"])
        assert len(server.worker_pids("late")) == left


def test_the_plan_warns_of_what_was_said_and_names_what_is_wrong(tmp_path: Path) -> None:
    build_archive(tmp_path, "echo", config="batchSize: 2\n")
    store = f"--model-store={tmp_path}"
    many = modelyard("serve", "start", store, "--models=echo", "--workers=99", "--explain-plan")
    assert many.returncode == 0
    assert "echo 1.0" in many.stdout and "99" in many.stdout
    assert "warning: 99 threads of workers on" in many.stderr
    build_archive(tmp_path, "echo", config="batchSize: none\n")
    wrong = modelyard("serve", "start", store, "--models=echo", "--explain-plan")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: model-config.yaml: batchSize: expected a whole number")


def test_two_archives_of_one_name_are_named_before_a_worker_starts(tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_archive(store, "echo").rename(store / "second.mar")
    build_archive(store, "echo")
    said = re.compile(
        r"(echo|second)\.mar and (echo|second)\.mar are both version 1\.0 of model echo: "
        r"leave one out, or name it otherwise \(NAME=FILE\)"
    )
    plan = partial(Settings, model_store=store, state_dir=tmp_path)
    with pytest.raises(Conflict, match=said):
        plan_start(plan(models=("ALL",)))
    assert len(plan_start(plan(models=("echo", "twin=second"))).models) == 2
    ran = modelyard(*start_arguments(tmp_path, store), "--models=ALL")
    assert ran.returncode == 1
    assert said.fullmatch(ran.stderr.strip().removeprefix("error: "))
    assert "ready" not in (tmp_path / "logs" / "server.log").read_text()
