"""What Hatchway is about, as pure values and functions: ids, the lifecycle table, shapes, errors and what they look like
over HTTP (`problems`), and how a body is checked (`checking`).

Imports nothing else of ours and does no I/O; everything else may import it.
"""
