"""How a plan is carried out: whole rows, or rows in chunks."""
