"""Collectives and step queues of CPU ranks, over memory that the ranks of a cell share."""
