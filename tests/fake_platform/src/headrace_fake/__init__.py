"""A platform without a device: see the README."""
