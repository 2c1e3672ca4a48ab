"""Counting the exponents of a gradient where it is, inside a compiled step: a module for each.

All have the same names, and make the table of `lossscale.diagnostics.exponents`:

- `count_bins(gradient)`: the table as a few small tensors; a pure function of one gradient.
- `on_host(table)`: the same table in NumPy, for `GradientHistogram.from_table`.
"""
