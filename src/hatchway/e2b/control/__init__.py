"""The control surface: E2B's REST API of sandboxes, snapshots and templates, mapped to API v1.

`routes` puts the handlers together; each module is named after what it serves, and `views` is what they all answer with.
"""
