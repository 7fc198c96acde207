"""A hook of mkdocs: a link to what the site does not hold becomes the path in the repository."""

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?!images/)[^)#]+|[a-z_]+\.(?:toml|json))(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page whose links to files of the repository are their paths in it."""
    depth = page.file.src_uri.count("/") + 1

    def name(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        if path.count("../") < depth and path.startswith("../"):
            return found[0]  # of a record, to a page
        place = path.replace("../", "") if path.startswith("../") else f"docs/{path}"
        return text if place in text else f"{text} (`{place}`)"

    # What a test of a block is told, as "sh fails", is not a word of a language.
    return _LINK.sub(name, re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.M))
