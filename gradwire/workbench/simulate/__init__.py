"""A simulation of data-parallel training: P virtual workers in one process.

`simulation.Simulation` trains them. Three classes compute all workers' gradients of one step:
`GraphPasses` as one CUDA graph, `BatchedPasses` as one large batch, `ThreadedPasses` on threads.
"""
