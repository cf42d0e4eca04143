"""HTTP of intercepted flows: strict parsing, one decision for each request, what was decided is what is sent.

`session` is the way in. `http1` and `http2` are the client's side, `heads` and `framing` take messages apart, `judging` brings a request
into the one form that is decided on and says what goes on of it (`fields`, `placeholders`, `terms`), `exchanges` decides and `carrying`
carries, over connections to the outside that are `lines`; `websocket` is what some of them become, `refusals` is what a client is told.
`seam` says what the rest of the gateway gives and wants; the room knows only that, the domain and the wire.
"""
