"""How the launcher says no."""

from hatchway.wire.launcher import Failed


class Refused(Exception):
    """A request that is not done; becomes the `Failed` answer with the same members."""

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy

    def answer(self) -> Failed:
        """Returns the answer for the client."""
        return Failed(code=self.code, message=self.message, remedy=self.remedy)


class Unfit(Exception):
    """The launcher cannot run here; the text says why and what to do. Ends the process."""
