"""What the frameworks share; nothing here imports one."""
