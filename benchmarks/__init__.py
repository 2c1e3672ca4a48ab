"""What loss scaling costs: `python -m benchmarks`. See docs/benchmarks.md."""
