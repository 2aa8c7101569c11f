"""Starts the processes of a run, and determines each process's place in it."""
