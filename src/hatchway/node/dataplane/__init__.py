"""The HTTP side of a node: what clients stream to and from.

`app` lays out the paths, `attach`, `output`, `stdin` and `control` answer them, `sse` and `problems` say what goes over the
wire, `tokens` decides who may, `server` runs it. May import `domain`, `wire`, `node.sessions` and `node.guest.seam`; is
started by the node's `main`, which gives it what `seam` asks for.
"""
