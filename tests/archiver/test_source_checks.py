import pytest

from modelyard.archiver.requirements import Pin
from modelyard.archiver.source_checks import source_warnings

SIX = Pin("six", "1.17.0", "a" * 64)


def warnings(code: str, *names: str, pins: tuple[Pin, ...] = ()) -> list[str]:
    return source_warnings(["handler.py", *names], [("handler.py", code.encode())], pins)


@pytest.mark.parametrize(
    "code",
    [
        "import json\nfrom os import path\n",
        "import torch, numpy as np\nfrom PIL import Image\nimport yaml\n",
        "from modelyard.handlers import BaseHandler\n",
        "import sibling\nfrom package.inner import x\nfrom . import y\n",
        "import six\n",
        "try:\n    import not_there\nexcept ImportError:\n    pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import not_there\n",
        "this is not Python",
    ],
    ids=["stdlib", "ours", "names", "archive", "pin", "try", "types", "broken"],
)
def test_what_is_provided_gives_no_warning(code: str) -> None:
    assert warnings(code, "sibling.py", "package/inner.py", pins=(SIX,)) == []


@pytest.mark.parametrize(
    ("code", "module", "line"),
    [
        ("import six\n", "six", 1),
        ("import os\nfrom not_there.sub import x\n", "not_there", 2),
        ("def f():\n    import not_there\n", "not_there", 2),
        (
            "class A:\n    def f(self):\n        if x:\n            import not_there\n",
            "not_there",
            4,
        ),
        ("if True:\n    pass\nelse:\n    import not_there\n", "not_there", 4),
        ("with x:\n    for y in z:\n        import not_there\n", "not_there", 3),
    ],
)
def test_an_import_that_nothing_provides_is_named_with_its_line(
    code: str, module: str, line: int
) -> None:
    (warning,) = warnings(code)

    assert warning.startswith(
        f"handler.py:{line} imports {module}, which is neither in the archive"
    )


def test_an_import_is_named_once() -> None:
    assert len(warnings("import not_there\nimport not_there.sub\n")) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/model.pt",
        "/data/labels",
        "C:\\\\models\\\\m.pt",
        "/mnt/share/my files/x",
        "/tmp/a/",
    ],
)
def test_an_absolute_path_is_named_with_its_line(path: str) -> None:
    (warning,) = warnings(f'import os\nopen("{path}")\n')

    assert warning.startswith('handler.py:2 names the path "')
    assert "which other machines may not have" in warning


@pytest.mark.parametrize(
    "code",
    [
        '"""Reads /home/me/model.pt."""\n',
        '"""/home/me/model.pt"""\n',
        'x = "/predictions"\n',
        'x = "a/b/c"\n',
        'x = "image/png"\n',
        'x = "/"\n',
        'x = "/dev/shm/x"\n',
        'x = "https://example.org/a/b"\n',
        'x = "see /home/me for more"\n',
    ],
)
def test_other_texts_give_no_warning(code: str) -> None:
    assert warnings(code) == []


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("modelyard.py", "modelyard.py has the name of a module of modelyard"),
        ("json.py", "json.py hides the standard library's json"),
        (
            "six.py",
            "six.py hides the required package six: `import six` finds your file; rename it",
        ),
    ],
)
def test_a_file_that_hides_another_module_is_named(name: str, warning: str) -> None:
    assert warnings("", name, pins=(SIX,))[0].startswith(warning)


def test_a_package_is_known_by_what_it_is_imported_as() -> None:
    """PyYAML says so here; it is pinned and hidden by a file of the archive."""
    pin = Pin("pyyaml", "6.0", "a" * 64)

    assert "yaml.py hides the required package pyyaml" in warnings("", "yaml.py", pins=(pin,))[0]
