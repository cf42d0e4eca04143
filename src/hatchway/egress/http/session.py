"""The way in: an intercepted connection of a sandbox, from its first request to its last."""

from hatchway.domain.errors import HatchwayError
from hatchway.domain.policy.verdicts import Verdict
from hatchway.egress.http import judging
from hatchway.egress.http.exchanges import Exchanges
from hatchway.egress.http.heads import RequestHead
from hatchway.egress.http.http1 import Http1
from hatchway.egress.http.http2 import Http2
from hatchway.egress.http.seam import BoundFlow, Stream, StreamLost


class HttpSession:
    """What `seam.Http` promises."""

    async def serve(self, client: Stream, flow: BoundFlow) -> None:
        """Serves requests until the client is done."""
        exchanges = Exchanges(flow)
        client.when_lost(exchanges.close)
        try:
            if flow.alpn == "h2":
                await Http2(client, exchanges).serve()
            else:
                await Http1(client, exchanges).serve()
        except (StreamLost, TimeoutError):
            client.abort()
        finally:
            exchanges.close()

    async def refuse(self, client: Stream, flow: BoundFlow, verdict: Verdict) -> None:
        """Answers the first request with the verdict on the connection as such."""

        def judge(head: RequestHead) -> HatchwayError:
            return judging.refused(verdict)

        exchanges = Exchanges(flow)
        try:
            if flow.alpn == "h2":
                await Http2(client, exchanges).refuse(judge)
            else:
                await Http1(client, exchanges).refuse(judge)
        except (StreamLost, TimeoutError):
            client.abort()
