"""Hatchway runs the code of AI agents and users in isolated microVMs behind an HTTP API."""

__version__ = "0.1.0"
