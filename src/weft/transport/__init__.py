"""Carry: three interpreters. `loopback` says what flows mean, `virtual` what they cost, `collective` runs them."""
