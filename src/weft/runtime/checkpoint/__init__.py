"""Saves a run and resumes it."""
