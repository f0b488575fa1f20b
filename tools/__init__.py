"""Parts of a checkout that are not in the wheel."""
