"""Durable state of a run: complete or rejected, and readable without Weft."""
