"""Tells another service of requests for approval: signed, at least once, in no particular order.

```
POST URL
Hatchway-Delivery: <id>              the same in every try
Hatchway-Signature: t=<Unix seconds>,v1=<HMAC-SHA256 of "t.body" in hexadecimal digits>
{"delivery": …, "event": "approval.asked", "approval": {…}}
```
Whoever receives it compares the signature in constant time, and refuses what is older than some minutes. A redirect is not followed.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from hatchway.domain.errors import Unprocessable
from hatchway.domain.ids import new_id

if TYPE_CHECKING:
    import httpx

TRIES_S: tuple[float, ...] = (1.0, 5.0, 30.0, 120.0)
"""Pauses between tries; after the last one it is given up."""
WITHIN_S = 10.0
MAX_WAITING = 1000
AT_ONCE = 8

log = logging.getLogger(__name__)


class Webhook:
    """One receiver. `tell` never waits; `close` gives up what is on its way."""

    def __init__(self, url: str, secret: bytes, *, tries_s: tuple[float, ...] = TRIES_S) -> None:
        """Raises `Unprocessable("webhook")` for a URL that is not https (or http on this machine), and without a secret."""
        self._url = _checked(url)
        if len(secret) < 16:
            raise Unprocessable(
                "webhook", "The secret of the webhook is shorter than 16 octets.", "`openssl rand -hex 32` makes one."
            )
        self._secret = secret
        self._tries_s = tries_s
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: httpx.AsyncClient | None = None

    def tell(self, event: str, approval: msgspec.Struct) -> None:
        """Sends a message, again until it is taken (2xx) or given up."""
        if len(self._tasks) >= MAX_WAITING:
            log.error("more than %d messages wait for the webhook; %s is not sent", MAX_WAITING, event)
            return
        delivery = new_id()
        body = msgspec.json.encode({"delivery": delivery, "event": event, "approval": approval})
        task = asyncio.get_running_loop().create_task(self._deliver(delivery, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up what is on its way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    async def _deliver(self, delivery: str, body: bytes) -> None:
        why = ""
        for pause in (*self._tries_s, None):
            async with self._places:
                why = await self._try(delivery, body)
            if not why:
                return
            if pause is not None:
                await asyncio.sleep(pause)
        log.error("the webhook did not take %s: %s", delivery, why)

    async def _try(self, delivery: str, body: bytes) -> str:
        """One try; why it failed, or nothing."""
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=WITHIN_S)
        headers = {
            "content-type": "application/json",
            "user-agent": "hatchway",
            "hatchway-delivery": delivery,
            "hatchway-signature": signature(self._secret, body, int(time.time())),
        }
        try:
            async with asyncio.timeout(WITHIN_S):
                async with self._http.stream("POST", self._url, content=body, headers=headers) as answer:
                    return "" if answer.status_code // 100 == 2 else f"it answered {answer.status_code}"
        except (httpx.HTTPError, TimeoutError) as error:
            return str(error) or type(error).__name__


def signature(secret: bytes, body: bytes, at: int) -> str:
    """What `Hatchway-Signature` says of a body that is sent at that time."""
    digest = hmac.new(secret, b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def _checked(url: str) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if (parts.scheme != "https" and not (parts.scheme == "http" and local)) or not parts.hostname:
        raise Unprocessable("webhook", "The webhook is no https URL.", "Only a receiver on this machine may be http.")
    return url
