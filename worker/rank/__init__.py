"""A rank's loop: obey directives, run steps, move tasks and KV at a switch."""
