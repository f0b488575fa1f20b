"""The values of the core: events and effects, records of switches, settings, costs."""
