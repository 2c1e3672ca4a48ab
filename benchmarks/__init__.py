"""What loss scaling costs: `python -m benchmarks`. See docs/internals/benchmarks.md."""
