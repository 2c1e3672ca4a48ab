"""Compares the verdicts of a diagnosis with training runs with and without loss scaling."""
