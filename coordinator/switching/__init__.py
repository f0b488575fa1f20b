"""Switches of layout: targets, page grants, migration commits, restoring a layout. Pure."""
