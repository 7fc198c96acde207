"""Imports of `ts` in an author's code, before it is archived."""

from __future__ import annotations

import pytest

from tests.archiver.test_source_checks import warnings


def test_a_module_that_workers_have_gives_no_warning() -> None:
    code = "from ts.torch_handler.base_handler import BaseHandler\nfrom ts.metrics import unit\n"
    assert warnings(code) == []


def test_a_module_of_torchserve_that_workers_lack_is_named() -> None:
    (warning,) = warnings("from ts.utils.util import x\nfrom ts.model_service.x import y\n")
    assert warning.startswith("handler.py:2 imports ts.model_service.x, a module of ts that")


@pytest.mark.parametrize("name", ["ts.py", "modelyard.py"])
def test_a_file_with_a_name_of_ours_is_named(name: str) -> None:
    module = name.removesuffix(".py")
    (warning,) = warnings("", name)
    assert warning.startswith(f"{name} has the name of a module of modelyard")
    assert warning.endswith(f"`import {module}` finds your file")
