"""Explanations of passes that are not finite; `explain` of each framework is public."""
