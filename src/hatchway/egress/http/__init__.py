"""HTTP of intercepted flows: strict parsing, one decision for each request, what was decided is what is sent.

`seam` says what the rest of the gateway gives and wants; everything else here knows only that, the domain and the wire.
"""
