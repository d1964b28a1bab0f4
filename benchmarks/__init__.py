"""What the harness costs, in ratios measured in one run. ``python -m benchmarks`` writes reports/bench/cpu.json."""
