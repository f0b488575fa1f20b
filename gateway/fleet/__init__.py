"""The cells that a gateway knows: which are there, how busy they are, and who gets a task."""
