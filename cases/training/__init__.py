"""Scripts that make and measure the bundled checkpoint `cases/tiny`: train, export, evaluate."""
