"""Whether an answer has begun: an error can be told until then, and is a connection that breaks off afterwards."""

from starlette.types import Message, Send


class Noting:
    """Passes the messages of one answer on."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        """Sends one; the answer has begun then."""
        self.begun = True
        await self._send(message)
