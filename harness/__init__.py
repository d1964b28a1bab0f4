"""Reference-vs-production numerical validation: the engine, the verdicts, the command line and the report."""

__version__ = "0.1.0"
