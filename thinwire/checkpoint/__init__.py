"""What is saved, how it is checked, and how it is redistributed to another number of ranks."""
