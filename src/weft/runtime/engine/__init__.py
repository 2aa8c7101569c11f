"""Exchange of gradient buckets, overlapped with backward."""
