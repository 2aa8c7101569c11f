"""Keeps what a run must not lose: complete or refused, and readable without Weft."""
