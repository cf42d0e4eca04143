"""What goes to the ports of sandboxes: HTTP and WebSockets, relayed to what listens there.

`admission` lets requests in and connects them; `relay` carries HTTP (`exchange`: one request and its answer, `heads`: what of their heads goes
on), `upgrades` what became a WebSocket, `guest_tls` is for ports that speak TLS themselves. May import the client, `wire`, `domain` and, of the
wrapper, what is in no room.
"""
