"""Copies units of KV memory between ranks: peer memory, copy kernel, movers."""
