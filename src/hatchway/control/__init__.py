"""The control plane: HTTP API v1, the engine that executes operations on nodes, and the reconciler that keeps what is stored true.

May import `domain`, `wire` and `storage`. A module is named after what it serves; `app.make_app` puts them together and `main.run`
is the process, which the supervisor starts. Clients call it over HTTP, it calls nodes over `wire.rpc`.
"""
