"""The formats of old releases: configurations and names of slots. Imports no framework."""
