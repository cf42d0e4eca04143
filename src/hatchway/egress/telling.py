"""What is written down about one flow: its denial, its failure, its beginning and its end."""

import logging
import ssl
import time
from typing import TYPE_CHECKING, Any

from hatchway.domain.policy.verdicts import Request, Verdict
from hatchway.egress.http.seam import FlowError
from hatchway.egress.peeking import Denied

if TYPE_CHECKING:
    from hatchway.egress.flows import Flow

log = logging.getLogger(__name__)


class Teller:
    """The records of a flow."""

    def __init__(self, flow: "Flow") -> None:
        self._flow = flow
        self._recorder = flow.gateway.recorder
        self._counts = flow.gateway.counts
        self._began = time.monotonic()

    def allowed(self, verdict: Verdict) -> None:
        """Before the first octet leaves. Raises `FlowError("audit_full")`: what cannot be recorded does not happen."""
        self._recorder.record("egress.connection", "allowed", verdict, data=self._told())
        self._counts.allowed += 1

    def asked(self, verdict: Verdict, request: Request | None) -> None:
        """Somebody is asked. Raises `FlowError("audit_full")`."""
        if request is None:
            self._recorder.record("egress.connection", "asked", verdict, data=self._told())
        else:
            told = {"host": self._flow.host, "method": request.method, "path": request.path}
            self._recorder.record("egress.request", "asked", verdict, data=told)

    def denied(self, denied: Denied) -> None:
        """It is not let through."""
        self._counts.deny(denied.reason)
        told = {**self._told(), "explanation": denied.explanation}
        verdict = denied.verdict or self._flow.verdict
        try:
            self._recorder.record("egress.connection", "denied", verdict, reason=denied.reason, data=told)
        except FlowError as error:
            log.warning("%s: a denial was not recorded: %s", self._flow.gateway.sandbox_id, error)

    def failed(self, error: FlowError) -> None:
        """The other side cannot be had."""
        self._counts.deny(error.reason)
        told = {**self._told(), "explanation": error.explanation}
        self._recorder.ended("egress.connection_failed", "failed", reason=error.reason, data=told, alike=True)

    def tls_failed(self, error: ssl.SSLError) -> None:
        """Mostly a client that does not trust the authority: its owner wants to read that somewhere."""
        self._counts.deny("tls_client_failed")
        told = {**self._told(), "error": error.reason or str(error)}
        self._recorder.ended("egress.tls_failed", "failed", reason="tls_client_failed", data=told, alike=True)

    def ended(self, reason: str) -> None:
        """What was let through is over."""
        flow = self._flow
        told = {
            **self._told(),
            **flow.outward.told,
            "bytes_out": flow.bytes_out,
            "bytes_in": flow.bytes_in,
            "seconds": round(time.monotonic() - self._began, 3),
        }
        self._recorder.ended("egress.connection_ended", reason=reason, data=told)

    def _told(self) -> dict[str, Any]:
        flow = self._flow
        told: dict[str, Any] = {"host": flow.host, "port": flow.port, "address": flow.address}
        if flow.sni and flow.sni != flow.host:
            told["sni"] = flow.sni
        return told
