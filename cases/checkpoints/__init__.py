"""Checkpoints of any size and layout: made, converted, inspected and verified. Shares no code with either side."""
