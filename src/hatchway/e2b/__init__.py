"""The E2B wrapper: serves the HTTP API of E2B and the traffic of its sandboxes, so that E2B's SDKs work unmodified.

It asks as a client does, through `hatchway.client`: with the key that a caller sent, or on behalf of a sandbox over a socket of the control
plane (`wire.behalf`). It has no database; what E2B's settings need beside our own lies in the annotations of the sandbox. `app` looks at
what a request is for and leads it into one of three rooms: `control`, E2B's API; `envd`, commands and files; `ports`. May import `client`,
`domain` and `wire`; the supervisor starts `main.run`.
"""
