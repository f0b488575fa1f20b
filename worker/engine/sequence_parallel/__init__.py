"""Module trees of groups that share out tokens, and their exchange around attention."""
