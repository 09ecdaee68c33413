"""A platform for headrace, to copy: see the README."""
