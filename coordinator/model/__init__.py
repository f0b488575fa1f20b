"""What the core is made of: events and effects, records of switches, settings."""
