"""Views of a run's JSONL: the HTML page, the step summary and the comparison of two runs. They recompute nothing."""
