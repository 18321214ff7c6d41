"""What a layer computes, from weights to context; one formula over replaceable parts."""
