"""The service that hostile guests attack: one of their own, as `hatchway up` starts it."""

from tests.acceptance.conftest import service

__all__ = ["service"]
