"""How a plan is carried out: whole rows."""
