"""The run folder: one event per step, and the description of the run."""
