"""A person in front of the console: signed in, and nothing that the browser complains of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.browser import Browser, browsing
from tests.serve.live import LiveServer

WIDTHS = (360, 1024, 2560)


class Visitor:
    """A browser at a server's console."""

    def __init__(self, browser: Browser, server: LiveServer) -> None:
        self.browser = browser
        self.root = f"{str(server.management.base_url).rstrip('/')}/console"
        self.forgiven: list[str] = []
        """Parts of what the browser may complain of."""

    def open(self, path: str = "") -> Browser:
        """Go to a page of the console."""
        self.browser.open(f"{self.root}{path}")
        return self.browser

    def sign_in(self, token: str) -> Browser:
        """Sign in with a token, by keys alone."""
        page = self.open("/sign-in")
        page.find("#token").type(token)
        page.press("Enter")
        page.wait(lambda: "/sign-in" not in page.address, "the console opens")
        return page

    def check(self) -> None:
        """Fail where a page asked elsewhere for anything, or the browser complained."""
        self.browser.look()
        origins = {
            "{0.scheme}://{0.netloc}".format(urlsplit(each)) for each in self.browser.requests
        }
        assert origins <= {self.root.removesuffix("/console")}
        problems = [each for each in self.browser.problems
                    if not any(part in each for part in self.forgiven)]  # fmt: skip
        assert problems == []


@contextmanager
def visiting(driver: str, server: LiveServer, folder: Path, *flags: str) -> Iterator[Visitor]:
    """Open a browser for a block and check it at its end; a failure leaves a screenshot.

    Args:
        driver: address of the browser's driver.
        server: whose console it is.
        folder: for the screenshot.
    """
    with browsing(driver, *flags) as browser:
        visitor = Visitor(browser, server)
        try:
            yield visitor
            visitor.check()
        except BaseException:
            browser.screenshot(folder / "failed.png")
            (folder / "failed.txt").write_text(f"{browser.address}\n{browser.text()}\n")
            raise
