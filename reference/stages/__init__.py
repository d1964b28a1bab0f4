"""The stages of the reference side: each calls the unmodified Hugging Face module that computes it."""
