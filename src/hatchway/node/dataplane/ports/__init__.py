"""Ports of a sandbox: what listens on TCP in the guest, its loopback included, reached by clients of the node.

`names` knows the host names that ports have, `access` lets a request in and sets the cookie of a browser, `heads` says what of a
request and of an answer goes through, `dialling` connects to the guest, `relay` carries HTTP and whatever it is upgraded to, `tunnel`
carries raw TCP over a WebSocket, `front` tells the requests of ports from those of the API. What comes from either side is
believed by nobody: both are parsed, checked and written anew. May import what `dataplane` may; `dataplane.app` and
`dataplane.server` use it.
"""
