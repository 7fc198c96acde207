"""Events that go out: a POST of JSON to one address, which nobody waits for."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
from datetime import UTC, datetime
from functools import partial
from urllib.parse import urlsplit

from modelyard.plugins.ops.console.events import Event
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

MOST_WAITING = 100
"""Alerts that wait to be sent; further ones are left out, and the log says so."""
TIMEOUT_S = 5.0
"""Time of one try, from the look-up of the name to the first line of the answer."""
PAUSES_S = (0.0, 2.0, 10.0)
"""Pause before each try."""
MOST_KEY_BYTES = 4096
SIGNATURE = "x-modelyard-signature"
KINDS = ("restart-storm", "restart", "refusals", "time-outs", "errors", "no-worker", "returned",
         "failed", "promoted", "not-registered", "reasons-changed", "server-started")  # fmt: skip
"""Kinds of events that may go out, as `alert_events` has them."""


class Alerts:
    """Sends events of the kinds that are wanted.

    Raises:
        StartError: the settings name an unknown kind, or a key that cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._url = settings.alert_url or ""
        self._kinds = frozenset(settings.alert_events)
        if unknown := sorted(self._kinds.difference(KINDS)):
            known = ", ".join(KINDS)
            raise StartError(
                f"alert_events: {unknown[0]!r} is not a kind; expected some of {known}"
            )
        self._key = b""
        if (file := settings.alert_key_file) is not None:
            try:
                with file.open("rb") as opened:
                    self._key = opened.read(MOST_KEY_BYTES).strip()
            except OSError as error:
                raise StartError(f"alert_key_file: cannot read {file}: {error.strerror}") from error
            if not self._key:
                raise StartError(f"alert_key_file: {file} is empty; expected a key of any bytes")
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def __call__(self, event: Event) -> None:
        """Take an event; it is sent from a task."""
        kind = event.kind.replace(" ", "-")
        if not self._url or kind not in self._kinds:
            return
        content = {
            "kind": kind,
            "model": event.key[0],
            "version": event.key[1],
            "text": event.text,
            "at": datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
        }
        try:
            self._waiting.put_nowait(json.dumps(content).encode())
        except asyncio.QueueFull:
            logger.error("an alert is left out: %d wait already", MOST_WAITING)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        import httpx  # which few servers need

        # It reads the system's certificates.
        make_client = partial(httpx.AsyncClient, trust_env=False, timeout=None)
        async with await asyncio.to_thread(make_client) as client:
            while not self._waiting.empty():
                body, why = self._waiting.get_nowait(), ""
                headers = {"content-type": "application/json"}
                if self._key:
                    signed = hmac.new(self._key, body, hashlib.sha256).hexdigest()
                    headers[SIGNATURE] = f"sha256={signed}"
                for pause_s in PAUSES_S:
                    await asyncio.sleep(pause_s)
                    sent = client.stream("POST", self._url, content=body, headers=headers)
                    try:
                        # Of the answer its status alone; where it leads elsewhere, nobody follows.
                        async with asyncio.timeout(TIMEOUT_S), sent as answer:
                            if answer.is_success:
                                break
                            why = f"status {answer.status_code}"
                    except (OSError, TimeoutError, httpx.HTTPError) as error:
                        why = str(error) or type(error).__name__
                else:
                    host = urlsplit(self._url).hostname
                    tries = len(PAUSES_S)
                    logger.error("an alert is lost, %s was asked %d times: %s", host, tries, why)

    def close(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()
