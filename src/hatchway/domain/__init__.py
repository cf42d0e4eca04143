"""What Hatchway is about, as pure values and functions: ids, errors, the lifecycle table, shapes.

Imports nothing else of ours and does no I/O; everything else may import it.
"""
