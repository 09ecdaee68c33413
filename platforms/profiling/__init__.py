"""What a profile compares with: the work that ops have to do, and what a device can do, measured."""
