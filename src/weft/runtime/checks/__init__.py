"""Checks in every step: finite values, equal replicas, equal steps."""
