"""From one layout to the next: targets, page grants, commits of moves, restoring. Pure."""
