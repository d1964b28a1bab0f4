"""``harness generate``: both sides through a generation, token by token, each with its own caches."""
