"""Perform: the objects that run a strategy. Read `worker` first."""
