"""Module trees of groups that divide a step's tokens, and their exchange around attention."""
