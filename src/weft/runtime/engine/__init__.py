"""Exchanges of gradient buckets beside backward."""
