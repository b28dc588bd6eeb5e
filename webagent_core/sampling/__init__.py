"""Which trajectories and tasks make up the training data: filters, replay, curricula, new tasks, search and pairs.

Both backends call the same parts, and the parts know neither: they take outcomes, names and plain data, and give back
choices. `state.Sampling` holds what one run needs of them and its whole state.
"""
