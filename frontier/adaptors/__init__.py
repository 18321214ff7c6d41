"""Other programs' names for our functions."""
