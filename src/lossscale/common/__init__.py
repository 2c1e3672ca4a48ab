"""Code that the frameworks share; nothing here imports a framework."""
