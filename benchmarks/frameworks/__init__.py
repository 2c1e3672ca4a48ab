"""How each framework runs a step: one file for each backend, with the same two classes.

`Apply` applies gradients that were computed before. `Train` is a whole training step. Both are
programs for `benchmarks.timing`, with a few members more:

- `parameters()`: the values of the trained variables, NumPy arrays;
- `structure()`: what is measured beside time, a dictionary of numbers.
"""
