"""What only saves time. Everything else is right without it."""
