"""The user's loop and the user's objects: optimizer, data, random numbers, and what a loop must not do."""
