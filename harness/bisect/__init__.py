"""``harness bisect``: which smallest set of production stages breaks the logits."""
