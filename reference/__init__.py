"""The reference side: unmodified Hugging Face DeepseekV4 modules, stage by stage, and their float64 oracle.

``build.model`` is the entry point. The package decodes checkpoints by itself and shares no code with production.
"""
