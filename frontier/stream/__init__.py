"""The river: one loop, its ring of slots, its lanes, and those who listen."""
