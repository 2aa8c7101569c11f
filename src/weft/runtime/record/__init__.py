"""The run folder: one event per step, and whatever describes the run."""
