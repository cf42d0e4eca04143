"""Hatchway runs the code of AI agents and users in isolated microVMs behind an HTTP API.

One room per folder, each with its own rules about what it may import (`.importlinter`): `domain` and `wire` are shared; `control` with
`storage`, `node` and `launcher` are processes of their own, which `supervisor` starts; `client` is the SDK, `cli` the commands, `bench` measures.
"""

__version__ = "0.1.0"
