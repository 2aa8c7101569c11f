"""Checks on every step: finite values, equal replicas, equal steps."""
