"""Judging numbers: the contract's rule, the dense reference, inputs that try it, the odds, promotion."""
