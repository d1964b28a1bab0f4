"""The verdict rules, one file each, and what they need of a tensor. ``rows`` puts them together."""
