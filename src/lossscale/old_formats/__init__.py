"""What old releases wrote: configurations and the names of slots. Pure knowledge, no framework."""
