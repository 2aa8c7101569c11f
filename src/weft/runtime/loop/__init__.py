"""The user's loop and objects: optimizer, data, random numbers, and the checks on their use."""
