"""A real browser for tests: Chromium, by its own driver, which speaks W3C WebDriver over HTTP.

`apt-get install chromium chromium-driver` is all that it needs (docs/decisions/0098). Pages see
real keys and clicks: an element that is covered, hidden or out of reach cannot be clicked.

Protocol: https://www.w3.org/TR/webdriver2/, and Chromium's own commands below `goog/`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of a reference to an element, by the standard."""
TIMEOUT_S = 60.0
TRIES = 5
FLAGS = (
    *("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
    *("--in-process-gpu", "--disable-software-rasterizer"),  # a quarter of the CPU of a start
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--no-default-browser-check", "--mute-audio"),
    "--js-flags=--expose-gc",
)
CONTRAST = """
const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = (color) => {
  paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    layers.push(rgba(getComputedStyle(at).backgroundColor));
    if (layers[layers.length - 1][3] === 1) break;
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const light = (color) => {
  const [r, g, b] = color.map((v) => v / 255).map(
    (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
  if (!text || !element.checkVisibility({visibilityProperty: true}) || element.disabled) continue;
  const below = behind(element), own = over(rgba(getComputedStyle(element).color), below);
  const [low, high] = [light(own), light(below)].sort((a, b) => a - b);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${element.tagName} ${text.slice(0, 40)}`);
}
return found;
"""
"""A script; for what contrast is see https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
KEYS = {
    "Tab": "\ue004", "Enter": "\ue007", "Space": " ", "Escape": "\ue00c", "Shift": "\ue008",
    "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015",
}  # fmt: skip


def find_missing() -> str | None:
    """Return which program is missing for a browser, None where all are there."""
    if not any(map(shutil.which, CHROMIUM)):
        return "no browser is here: apt-get install chromium"
    if not shutil.which(DRIVER):
        return "no driver of the browser is here: apt-get install chromium-driver"
    return None


class Element:
    """An element of the page."""

    def __init__(self, browser: Browser, id: str) -> None:
        self._browser = browser
        self.id = id

    def click(self) -> None:
        """Click it, where a person could."""
        self._browser.send("POST", f"element/{self.id}/click", {})

    def type(self, text: str) -> None:
        """Type into it; into a file's input, its path."""
        self._browser.send("POST", f"element/{self.id}/value", {"text": text})

    def clear(self) -> None:
        """Empty it."""
        self._browser.send("POST", f"element/{self.id}/clear", {})

    def choose(self, option: str) -> None:
        """Choose an option of a list by its value."""
        self.find(f'option[value="{option}"]').click()

    def find(self, css: str) -> Element:
        """Return the first element in it that fits."""
        found = self._browser.send("POST", f"element/{self.id}/element", _by(css))
        return Element(self._browser, found[ELEMENT])

    @property
    def text(self) -> str:
        """What a reader sees of its text."""
        return str(self._browser.send("GET", f"element/{self.id}/text"))

    def value_of(self, name: str) -> Any:
        """Return a property."""
        return self._browser.send("GET", f"element/{self.id}/property/{name}")

    @property
    def label(self) -> str:
        """What a screen reader calls it."""
        return str(self._browser.send("GET", f"element/{self.id}/computedlabel"))

    @property
    def role(self) -> str:
        """What a screen reader says that it is."""
        return str(self._browser.send("GET", f"element/{self.id}/computedrole"))

    @property
    def is_shown(self) -> bool:
        """Whether a reader sees it."""
        return bool(self._browser.send("GET", f"element/{self.id}/displayed"))


class Browser:
    """A session of a browser with one page.

    Args:
        driver: address of the driver.
        session: its id.
    """

    def __init__(self, driver: str, session: str) -> None:
        self._client = httpx.Client(
            base_url=f"{driver}/session/{session}/", timeout=60, trust_env=False
        )
        self.requests: list[str] = []
        """Addresses that the page asked for, up to the last look at them."""
        self.problems: list[str] = []
        """What the browser complained of: violations of a policy, errors, failed requests."""

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """Send a command and return its value; fail with what the driver says."""
        answer = self._client.request(method, path, json=body)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        self.send("POST", "url", {"url": address})

    @property
    def address(self) -> str:
        """Where the page is."""
        return str(self.send("GET", "url"))

    def find(self, css: str) -> Element:
        """Return the first element that fits, as soon as there is one."""
        return Element(self, self.wait(lambda: self._ids(css), f"an element {css}")[0])

    def find_all(self, css: str) -> list[Element]:
        """Return all elements that fit now."""
        return [Element(self, id) for id in self._ids(css)]

    def _ids(self, css: str) -> list[str]:
        return [found[ELEMENT] for found in self.send("POST", "elements", _by(css))]

    def text(self, css: str = "body") -> str:
        """Return what a reader sees of an element's text."""
        return self.find(css).text

    def shows(self, text: str, css: str = "body", timeout_s: float = TIMEOUT_S) -> str:
        """Wait until an element's text holds another; return the whole of it."""
        found = ""

        def look() -> bool:
            nonlocal found
            with suppress(AssertionError):  # the page is exchanging it
                found = self.text(css)
            return text in found

        try:
            self.wait(look, "", timeout_s)
        except AssertionError:
            raise AssertionError(
                f"{css} does not show {text!r} within {timeout_s:g} s, but\n{found}"
            ) from None
        return found

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the condition's value as soon as it is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.05)
        return value

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return its value."""
        return self.send("POST", "execute/sync", {"script": script, "args": arguments})

    def press(self, *keys: str) -> None:
        """Press keys where the focus is: names of `KEYS`, as in `Shift+Tab`, or text."""
        actions = []
        for key in keys:
            *held, last = key.split("+") if key in KEYS or "+" in key else [key]
            codes = [KEYS[each] for each in held]
            typed = [KEYS[last]] if last in KEYS else list(last)
            actions += [{"type": "keyDown", "value": code} for code in codes]
            for code in typed:
                actions += [{"type": kind, "value": code} for kind in ("keyDown", "keyUp")]
            actions += [{"type": "keyUp", "value": code} for code in codes]
        self.send("POST", "actions", {
            "actions": [{"type": "key", "id": "keyboard", "actions": actions}]
        })  # fmt: skip

    @property
    def focused(self) -> Element:
        """The element that has the focus."""
        return Element(self, self.send("GET", "element/active")[ELEMENT])

    def tool(self, command: str, **parameters: Any) -> Any:
        """Send a command of the browser's own tools (the DevTools protocol)."""
        return self.send("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page a size; a window has no smaller one than 500 pixels."""
        self.tool(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """Have the reader prefer `dark` or `light`."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tool("Emulation.setEmulatedMedia", features=media)

    def overflow(self) -> str:
        """Return what makes the page scroll sideways, empty where nothing does."""
        return str(self.run(
            """const most = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= most) return '';
            const wide = [...document.querySelectorAll('body *')].filter(
                each => each.getBoundingClientRect().right > most + 1);
            return wide.map(each => each.tagName + '.' + each.className).join(' ') || 'the page';"""
        ))  # fmt: skip

    def heap_bytes(self) -> int:
        """Return what the page's script holds, after its garbage was collected."""
        self.tool("HeapProfiler.collectGarbage")
        return int(self.tool("Runtime.getHeapUsage")["usedSize"])

    def nodes(self) -> int:
        """Return how many nodes the page has, those that wait for the collector included."""
        return int(self.tool("Memory.getDOMCounters")["nodes"])

    def faint_texts(self) -> list[str]:
        """Return texts that have less contrast than WCAG's level AA asks for, 4.5 to 1."""
        return list(self.run(CONTRAST))

    def look(self) -> None:
        """Read what was asked for and complained of since the last look."""
        for entry in self.send("POST", "se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = message["params"]["request"]["url"]
                if not address.startswith(("data:", "blob:")):
                    self.requests.append(address)
        self.problems += [
            entry["message"]
            for entry in self.send("POST", "se/log", {"type": "browser"})
            if entry["level"] != "DEBUG"  # advice to who writes pages
        ]

    def screenshot(self, file: Path, is_whole: bool = True) -> None:
        """Write a picture of the page."""
        file.parent.mkdir(parents=True, exist_ok=True)
        taken = self.tool("Page.captureScreenshot", captureBeyondViewport=is_whole)
        file.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the session; the browser ends with it."""
        with suppress(httpx.HTTPError):
            self._client.delete("")
        self._client.close()


def _by(css: str) -> dict[str, str]:
    return {"using": "css selector", "value": css}


@contextmanager
def running_driver(log: Path) -> Iterator[str]:
    """Start the driver on a free port for a block; yield its address."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # It takes a port that is free for IPv6, and ends where the same one is taken for IPv4.
    for _ in range(TRIES):
        process, port = _start_driver(log)
        if port:
            break
    try:
        assert port, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start_driver(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start it; return its port too, 0 where it has ended."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := re.search(r"successfully on port (\d+)", text := log.read_text())):
        if process.poll() is not None:
            return process, 0
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
    return process, int(found[1])


@contextmanager
def browsing(driver: str, *flags: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own for a block."""
    options = {
        "binary": next(found for name in CHROMIUM if (found := shutil.which(name))),
        "args": [*FLAGS, *(["--no-sandbox"] if os.getuid() == 0 else []), *flags],
        "perfLoggingPrefs": {"enableNetwork": True, "enablePage": False},
    }
    asked = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    body = {"capabilities": {"alwaysMatch": asked}}
    answer = httpx.post(f"{driver}/session", json=body, timeout=60, trust_env=False).json()
    assert "sessionId" in answer["value"], answer["value"]
    browser = Browser(driver, answer["value"]["sessionId"])
    try:
        yield browser
    finally:
        browser.close()


def choices(elements: Sequence[Element]) -> list[str]:
    """Return the texts of elements."""
    return [element.text for element in elements]
