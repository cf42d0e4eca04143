"""The `hatchway` command: what a person types, as thin commands over the SDK.

Imports `client` only, and the parts that run the service (`supervisor`) inside the commands that need them. Modules are
imported as late as possible, because every `hatchway run` pays for them. `main.main` is the entry point.
"""
