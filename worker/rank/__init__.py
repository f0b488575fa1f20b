"""A rank's loop: obeys directives, runs steps, migrates tasks and KV at a switch."""
