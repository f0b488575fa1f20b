"""Messages between processes, one module for each kind of peer."""
