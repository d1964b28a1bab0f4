"""What is run: TOML cases and the bundled checkpoint."""
