"""Alerts an operator to stalls: runs a command, or posts to a webhook. Neither can delay the run."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

from fedpdmc.errors import InputError

logger = logging.getLogger("fedpdmc.operations.status")
# Seconds that a command may take, and that each step of a post may take; posts at a time.
MOST_COMMAND, MOST_STEP, MOST_POSTS = 60.0, 10.0, 4


class StallNews(NamedTuple):
    """A stall that begins or ends. There is nothing about records in it.

    Attributes
    ----------
    state : {"stalled", "over"}
    stall : str
        A sentence.
    waiting_for : str
    seconds : int
    party, study : str
    """

    state: str
    stall: str
    waiting_for: str
    seconds: int
    party: str
    study: str


def command_words(text: str) -> list[str]:
    """The words of a command, which runs without a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError("on-stall", f"{text!r}: {error}", "Give a command in shell syntax.") from error
    if not words:
        raise InputError("on-stall", "no command", "Give a program and its arguments.")
    return words


def webhook_host(url: str) -> str:
    """The host of a webhook; all that is ever shown of the address, which may contain a secret."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        host = f"{parts.hostname}{'' if parts.port is None else f':{parts.port}'}"
    except ValueError:
        good, host = False, ""
    if not good or not url.isascii() or not url.isprintable() or " " in url or "@" in url.split("/")[2]:
        raise InputError(
            "stall-webhook", "an address that cannot be used", "Give https://host/path, or http:// on your own network."
        )
    return host


class CommandAlert:
    """Runs a command with the news in its environment."""

    def __init__(self, command: str):
        self._words = command_words(command)

    def __call__(self, news: StallNews) -> None:
        """Start the command and return."""
        told = {f"FEDPDMC_{key.upper()}": str(value) for key, value in news._asdict().items()}
        threading.Thread(target=self._run, args=(told,), name="fedpdmc-on-stall", daemon=True).start()

    def _run(self, told: dict[str, str]) -> None:
        try:
            done = subprocess.run(
                self._words, env=os.environ | told, stdin=subprocess.DEVNULL, timeout=MOST_COMMAND, check=False
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            logger.error("the command of --on-stall failed: %s", error)
            return
        if done.returncode:
            logger.error("the command of --on-stall ended with status %d", done.returncode)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses to take the news elsewhere."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """No other address."""
        return None


class WebhookAlert:
    """Posts the news as JSON. ``text`` in it is the sentence, as chat services show it."""

    def __init__(self, url: str):
        self._url, self._host = url, webhook_host(url)
        self._open = urllib.request.build_opener(_NoRedirects()).open
        self._places = threading.BoundedSemaphore(MOST_POSTS)

    def __call__(self, news: StallNews) -> None:
        """Begin to post and return."""
        if not self._places.acquire(blocking=False):
            logger.error("the webhook at %s is still busy with %d posts: this one is left out", self._host, MOST_POSTS)
            return
        threading.Thread(target=self._post, args=(news,), name="fedpdmc-webhook", daemon=True).start()

    def _post(self, news: StallNews) -> None:
        text = f"{news.study}, {news.party}: {news.stall}"
        body = json.dumps({"text": text, **news._asdict()}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "fedpdmc"}
        try:
            self._open(urllib.request.Request(self._url, body, headers, method="POST"), timeout=MOST_STEP).close()
        except urllib.error.HTTPError as error:
            logger.error("the webhook at %s answered with status %d", self._host, error.code)
            error.close()
        except Exception as error:  # noqa: BLE001
            # Only the kind of error: its text may repeat the address.
            logger.error("the webhook at %s could not be reached (%s)", self._host, type(error).__name__)
        finally:
            self._places.release()


def alerts(command: str | None, webhook: str | None) -> list[Callable[[StallNews], None]]:
    """The alerts that an operator has chosen."""
    chosen: list[Callable[[StallNews], None]] = []
    if command is not None:
        chosen.append(CommandAlert(command))
    if webhook is not None:
        chosen.append(WebhookAlert(webhook))
    return chosen
