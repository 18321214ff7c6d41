"""Where rows come from and where they go: seeded rows, files, host memory, and the rows that a judge will see again.

Takes    a case, and paths.
Gives    sources, sinks, masks and watched rows.
Knows nothing of layers, plans or cards.
"""
