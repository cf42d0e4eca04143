"""The version of E2B's agent that the room `envd` stands for: SDKs use what it has from then on, and warn of what it lacks."""

ENVD_VERSION = "0.6.4"
"""Commands without stdin (0.3.0), the server's default user (0.4.0), closing stdin (0.5.2), plain uploads (0.5.7), metadata of files (0.6.2),
entries in watches (0.6.3), watches of network mounts (0.6.4). It must be a version to PEP 440 and to semantic versioning alike."""
